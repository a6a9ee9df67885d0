"""What a rules file says without effect. Every finding is proved; what cannot be proved is not said.

    findings = lint(load("rules.yaml"), Modules.of(model))

A rule that matches nothing or is shadowed by earlier ones, patterns without a module, rules that contradict each other
or the device, conditions that split inputs into more graphs than torch compiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from heapq import nlargest
from typing import Any

from precisionpass.errors import RulesProblem
from precisionpass.rules.condition import Condition
from precisionpass.rules.facts import FACTS, canonical_word
from precisionpass.rules.model import Match, Rule
from precisionpass.rules.nearest import or_list, shown
from precisionpass.rules.pattern import matches
from precisionpass.rules.proof import follows, never
from precisionpass.rules.regions import graphs_needed
from precisionpass.rules.ruleset import RuleSet
from precisionpass.rules.settings import contradiction, has

MOST_PROOFS = 5000  # pairs of conditions compared for one rule set
MOST_COUNTS = 20  # rules whose conditions are tried on sizes
NEAREST = 3
RECOMPILE_LIMIT = 8  # torch._dynamo.config.recompile_limit, as torch has it
_NOTHING = ("constant", True)


@dataclass(frozen=True)
class Modules:
    """names: of all modules, "" the root. classes: of them, bare and dotted."""

    names: tuple[str, ...]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> Modules:
        """Of a torch.nn.Module, or of anything else with named_modules()."""
        named = list(model.named_modules())
        types = {type(module) for _, module in named}
        bare = {one.__name__ for one in types}
        dotted = {f"{one.__module__}.{one.__qualname__}" for one in types}
        return cls(tuple(sorted({name for name, _ in named})), (*sorted(bare), *sorted(dotted)))


def lint(rules: RuleSet, modules: Modules | None = None, device: str = "") -> tuple[RulesProblem, ...]:
    """Everything found, in the order of the rules.

    modules: of the model to hold module and class patterns against. device: where the model is to run ("cpu", "cuda"),
    "" where that is not known.
    """
    enabled = [rule for rule in rules.rules if rule.enabled and rule.match and rule.apply]
    linter = _Linter(enabled)
    found: list[RulesProblem] = []
    for index, rule in enumerate(enabled):
        without_effect = linter.matches_nothing(rule) or linter.shadowed(index)
        found += without_effect or [*linter.contradicts(index), *_without_kernel(rule, device), *linter.splits(index)]
        if modules is not None:
            found += _unknown_names(rule, modules)
    return tuple(found)


class _Linter:
    """The rules in force, and how many proofs may still be tried."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self.proofs = MOST_PROOFS
        self.counts = MOST_COUNTS
        self.split: set[str] = set()  # kinds of which too many graphs were found

    def matches_nothing(self, rule: Rule) -> list[RulesProblem]:
        """PP201: the condition holds nowhere, or everything that is named is left out again."""
        match = _match(rule)
        if never(_condition(match)):
            also = "" if match.training is None else f" while training is {shown(match.training)}"
            return [_problem(rule, "PP201", f"matches no site: its condition never holds{also}", "where")]
        if "**" in match.not_module or (match.module and set(match.module) <= set(match.not_module)):
            return [_problem(rule, "PP201", "matches no site: not_module leaves out all of module", "not_module")]
        return []

    def shadowed(self, index: int) -> list[RulesProblem]:
        """PP202: for each kind and each setting an earlier rule matches wherever this one does, and sets it.

        Rules of a file that is extended are there to be overridden, so only rules of one file are compared.
        """
        rule = self.rules[index]
        by: dict[str, Rule] = {}
        for kind in _match(rule).op:
            wanted = _set_at(rule, kind)
            for earlier in self.rules[:index]:
                sets = wanted & _set_at(earlier, kind)
                if sets and earlier.origin.file == rule.origin.file and self._covers(earlier, rule, kind):
                    wanted -= sets
                    by[earlier.id] = earlier
            if wanted:
                return []
        named = _and(f'rule "{one.id}" ({_place(one)})' for one in by.values())
        verb = "matches" if len(by) == 1 else "match"
        message = f"sets nothing: {named} {verb} wherever it does and set{'s' * (len(by) == 1)} the same first"
        return [_problem(rule, "PP202", message)]

    def contradicts(self, index: int) -> list[RulesProblem]:
        """PP205: with what other rules are bound to set at its sites, its settings cannot hold together."""
        rule = self.rules[index]
        for kind in _match(rule).op:
            values: dict[str, Any] = {}
            setter: dict[str, Rule | None] = {}
            for other in self.rules:
                is_sure = other is rule or self._covers(other, rule, kind)
                for name, value in _given(other).items():
                    if kind in _match(other).op and name in _set_at(other, kind) and name not in setter:
                        setter[name] = other if is_sure else None  # None: perhaps this rule, perhaps a later one
                        values |= {name: value} if is_sure else {}
            found = contradiction(values)
            setters = [setter[name] for name in found[2]] if found else []
            is_kept = values.get("implementation") == "keep" or setter.get("implementation", rule) is None
            if found and rule in setters and not is_kept:
                both = zip(found[2], setters, strict=True)
                named = _and(f'rule "{one.id}" ({_place(one)}) sets {name}' for name, one in both if one)
                message = f"has contradictory settings at every {kind} site: {named}; {found[1]}"
                return [_problem(rule, "PP205", message)]
        return []

    def splits(self, index: int) -> list[RulesProblem]:
        """PP207: with this rule, the conditions at its sites split inputs into more graphs than torch compiles."""
        rule = self.rules[index]
        for kind in _match(rule).op:
            matches = [_match(one) for one in self.rules[: index + 1]]
            alike = [one for one in matches if kind in one.op and _matches_where(one, _match(rule))]
            conditions = dict.fromkeys(one.condition for one in alike if one.condition and _asks(one.condition, kind))
            if kind in self.split or len(conditions) < RECOMPILE_LIMIT.bit_length() or self.counts == 0:
                continue
            self.counts -= 1
            if graphs_needed(list(conditions), RECOMPILE_LIMIT) > RECOMPILE_LIMIT:
                self.split.add(kind)
                message = (
                    f"has the last of {len(conditions)} conditions that split {kind} inputs by size into more than "
                    f"{RECOMPILE_LIMIT} graphs; torch compiles {RECOMPILE_LIMIT} (recompile_limit), then no more"
                )
                return [_problem(rule, "PP207", message, "where")]
        return []

    def _covers(self, wide: Rule, narrow: Rule, kind: str) -> bool:
        """Whether it is proved that `wide` matches every site of this kind that `narrow` matches."""
        one, two = _match(wide), _match(narrow)
        if kind not in one.op or not _matches_where(one, two) or one.predicate not in (None, two.predicate):
            return False
        if one.condition is None:
            return True
        if not all(kind in FACTS[name].ops for name in one.condition.names):
            return False  # without the fact the wide one does not match
        if one.condition == two.condition:
            return True
        self.proofs -= 1
        return self.proofs >= 0 and follows(one.condition.tree, _condition(two))


def _asks(condition: Condition, kind: str) -> bool:
    """Whether a site of this kind has every fact of the condition: without one the rule does not match, unasked."""
    return all(kind in FACTS[name].ops for name in condition.names)


def _without_kernel(rule: Rule, device: str) -> Iterator[RulesProblem]:
    """PP206: a rule that asks for the kernels where no site can be on a GPU."""
    asked = _given(rule).get("implementation")
    if asked not in ("triton", "hopper"):
        return
    on_a_gpu = ("==", ("fact", "device"), ("constant", "cuda"))
    if never(("and", _condition(_match(rule)), on_a_gpu)):
        message = f"asks for implementation: {asked}, and its condition holds on no GPU, which the kernels need"
        yield _problem(rule, "PP206", message, "where")
    elif device not in ("", "cuda") and not never(("and", _condition(_match(rule)), _is_on(device))):
        yield _problem(rule, "PP206", f"asks for implementation: {asked}, whose kernels need a GPU, on {shown(device)}")


def _is_on(device: str) -> tuple:
    return "==", ("fact", "device"), ("constant", canonical_word(device))


def _matches_where(wide: Match, narrow: Match) -> bool:
    """Whether modules, classes and mode of `narrow` are surely among those of `wide`; patterns are compared as text."""
    return (
        (wide.training is None or wide.training == narrow.training)
        and _contains(wide.module, narrow.module)
        and _contains(wide.class_, narrow.class_)
        and set(wide.not_module) <= set(narrow.not_module)
    )


def _contains(wide: tuple[str, ...], narrow: tuple[str, ...]) -> bool:
    return not wide or "**" in wide or (bool(narrow) and set(narrow) <= set(wide))


def _condition(match: Match) -> tuple:
    """The where condition together with training."""
    condition = match.condition.tree if match.condition else _NOTHING
    if match.training is None:
        return condition
    fact = ("fact", "training")
    return ("and", condition, fact if match.training else ("not", fact))


def _unknown_names(rule: Rule, modules: Modules) -> Iterator[RulesProblem]:
    """PP203 and PP204: patterns without a module or class, with the nearest names."""
    match = _match(rule)
    for key, patterns in (("module", match.module), ("not_module", match.not_module)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in modules.names):
                message = f"{key} {shown(pattern)} matches no module of the model; {_nearest(pattern, modules.names)}"
                yield _problem(rule, "PP203", message, key)
    for pattern in match.class_:
        if not any(matches(pattern, name) for name in modules.classes):
            bare = [name for name in modules.classes if "." not in name]
            message = f"class {shown(pattern)} is no module's class in the model; {_nearest(pattern, bare)}"
            yield _problem(rule, "PP204", message, "class")


def _nearest(pattern: str, names: Iterable[str]) -> str:
    text = pattern.removeprefix("re:")[:200]
    known = [name for name in names if name]
    if not known:
        return "the model has no named modules"
    near = nlargest(NEAREST, known, key=lambda name: SequenceMatcher(None, text, name, autojunk=False).ratio())
    return f"the nearest {'is' if len(near) == 1 else 'are'} {or_list(near).replace(' or ', ' and ')}"


def _problem(rule: Rule, code: str, message: str, key: str = "") -> RulesProblem:
    origin = rule.origin
    line, column = origin.match_places.get(key, (origin.line, origin.column))
    return RulesProblem(code, f"rule {shown(rule.id)} {message}", origin.file, line, column)


def _place(rule: Rule) -> str:
    return f"{rule.origin.file}:{rule.origin.line}" if rule.origin.line else rule.origin.file


def _match(rule: Rule) -> Match:
    assert rule.match is not None
    return rule.match


def _given(rule: Rule) -> Mapping[str, Any]:
    return rule.apply.given() if rule.apply else {}


def _set_at(rule: Rule, kind: str) -> set[str]:
    """The settings that a rule sets at a site of this kind."""
    return {name for name, value in _given(rule).items() if has(kind, name, value)}


def _and(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
