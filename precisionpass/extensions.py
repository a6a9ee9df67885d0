"""A user's own recognisers, actions and hooks, passed to compile and explain; nothing is registered anywhere."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from precisionpass.errors import PrecisionPassError
from precisionpass.rules import RuleSet
from precisionpass.rules.nearest import advice, shown
from precisionpass.rules.own import is_own
from precisionpass.sites import Recogniser, default_sites
from precisionpass.sites.recogniser import wrong_recogniser


@dataclass(frozen=True)
class Extensions:
    """Checked: recognisers in the order in which they choose, actions by name, "own." included, and hooks by name."""

    sites: tuple[Recogniser, ...] = default_sites
    actions: Mapping[str, Callable] = field(default_factory=dict)
    hooks: Mapping[str, Callable] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of site that are the user's own."""
        return tuple(one.kind for one in self.sites if one not in default_sites)

    def check(self, rules: RuleSet) -> None:
        """Whether every name of one's own in the rules was passed. Raises PrecisionPassError."""
        for rule in rules.rules:
            if not rule.enabled or rule.match is None or rule.apply is None:
                continue
            for kind in filter(is_own, rule.match.op):
                if kind not in self.kinds:
                    raise _missing(rule.id, f"matches {shown(kind)}", kind, self.kinds, "sites=[*default_sites, ...]")
            action = rule.apply.given().get("implementation")
            if is_own(action) and action not in self.actions:
                example = f'actions={{"{action}": ...}}'
                raise _missing(rule.id, f"names the action {shown(action)}", action, self.actions, example)
            for hook in rule.apply.hooks:
                if hook.call not in self.hooks:
                    example = f'hooks={{"{hook.call}": ...}}'
                    raise _missing(rule.id, f"calls the hook {shown(hook.call)}", hook.call, self.hooks, example)


NONE = Extensions()


def extensions(sites: Any = None, actions: Any = None, hooks: Any = None) -> Extensions:
    """What a user passed, checked. Raises PrecisionPassError for what is no recogniser, no action or no hook.

    sites: a list of Recogniser, None for default_sites. actions: a dict from "own.NAME" to a function. hooks: a dict
    from the name that a rule calls to a function.
    """
    return Extensions(_sites(sites), _actions(actions), _hooks(hooks))


def _hooks(hooks: Any) -> Mapping[str, Callable]:
    if hooks is None:
        return {}
    if not isinstance(hooks, Mapping):
        raise _wrong_hook("hooks", f"it is a {type(hooks).__name__}, not a dict")
    for name, hook in hooks.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise _wrong_hook(shown(name), "a name is letters, digits and underscores")
        if not callable(hook):
            raise _wrong_hook(name, f"it is a {type(hook).__name__}, not a function")
    return {name: _named(name, hook) for name, hook in hooks.items()}


def _wrong_hook(name: str, why: str) -> PrecisionPassError:
    return PrecisionPassError(f"the hook {name} cannot be used", where="hooks=", why=why, code="PP135",
                              fix='hooks={"name": function}')  # fmt: skip


def _sites(sites: Any) -> tuple[Recogniser, ...]:
    if sites is None:
        return default_sites
    if isinstance(sites, str | Mapping) or not isinstance(sites, Iterable):
        raise wrong_recogniser("list", f"sites is a {type(sites).__name__}, not a list such as [*default_sites, mine]")
    checked: list[Recogniser] = []
    for one in sites:
        if not isinstance(one, Recogniser):
            raise wrong_recogniser(getattr(one, "__name__", type(one).__name__), "it is no Recogniser")
        if one not in default_sites and not is_own(one.kind):
            raise wrong_recogniser(one.kind, 'its kind is "own." and letters, digits or underscores')
        if one.kind in (other.kind for other in checked):
            raise wrong_recogniser(one.kind, "it is there twice")
        checked.append(one)
    return tuple(checked)


def _actions(actions: Any) -> Mapping[str, Callable]:
    if actions is None:
        return {}
    if not isinstance(actions, Mapping):
        raise _wrong_action("actions", f"it is a {type(actions).__name__}, not a dict")
    for name, action in actions.items():
        if not is_own(name):
            raise _wrong_action(shown(name), 'a name is "own." and letters, digits or underscores')
        if not callable(action):
            raise _wrong_action(name, f"it is a {type(action).__name__}, not a function")
    return {name: _named(name, action) for name, action in actions.items()}


def _named(name: str, action: Callable) -> Callable:
    """An action or a hook as a plain function of that name: a graph cannot call just any object."""

    def call(*args, **kwargs):
        return action(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.replace(".", "_")
    call.__module__ = "precisionpass.extensions"
    return call


def _wrong_action(name: str, why: str) -> PrecisionPassError:
    return PrecisionPassError(f"the action {name} cannot be used", where="actions=", why=why, code="PP133",
                              fix='actions={"own.NAME": function}')  # fmt: skip


def _missing(rule: str, does: str, name: str, known: Iterable[str], way: str) -> PrecisionPassError:
    near = advice(name, known) if list(known) else ""
    return PrecisionPassError(f"rule {shown(rule)} {does}, which was not passed", where=name, code="PP134",
                              why=near, fix=f"pass {way} to precisionpass.compile or explain")  # fmt: skip
