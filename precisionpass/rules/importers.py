"""Rules from what other libraries use to pick modules, so that one list of names serves both.

Each function reads names and patterns alone, imports nothing of the other library, and returns a list of Rule for
`precisionpass.compile(model, rules=[...])`. Where the other library lets the first match decide, so do these rules:
later ones leave out what earlier ones match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from precisionpass.errors import RulesError, RulesProblem
from precisionpass.rules.model import Match, Rule
from precisionpass.rules.nearest import advice, shown
from precisionpass.rules.settings import OPS

KEEP = {"implementation": "keep"}
_GLOB = re.compile(r"[*?\[\]!]")

Ops = str | Sequence[str]


def from_torchao(
    fqn_to_config: Mapping[str, Any], settings: Callable[[Any], Mapping[str, Any] | None], op: Ops = "attention"
) -> list[Rule]:
    """Rules from the keys of torchao's FqnToConfig: exact names, "re:" and a pattern for the whole name, "_default".

    settings: what to apply for each configuration; None leaves the sites alone, and so does a configuration of None.
    An exact name wins over patterns, the first pattern over later ones, "_default" is for the rest. Names of parameters
    match nothing. Raises RulesError for patterns and settings that rules cannot have.
    """
    exact = [key for key in fqn_to_config if not key.startswith("re:") and key != "_default"]
    patterns = [key for key in fqn_to_config if key.startswith("re:")]
    rules: list[Rule] = []
    before: list[str] = []
    for number, key in enumerate([*exact, *patterns], start=1):
        config = fqn_to_config[key]
        pattern = _exactly(key) if key in exact else key
        left_out = [] if key in exact else before
        rules.append(_rule(f"torchao-{number}", key, op, _applied(config, settings), [pattern], left_out))
        before = [*before, pattern]
    if fqn_to_config.get("_default") is not None:
        applied = _applied(fqn_to_config["_default"], settings)
        rules.append(_rule("torchao-default", "_default", op, applied, [], before))
    return rules


def from_modules_to_not_convert(names: Iterable[str] | None, op: Ops = OPS) -> list[Rule]:
    """One rule that leaves alone what `modules_to_not_convert` of Hugging Face names, or none; put it first.

    As transformers 5 reads them: a regular expression for the start of a name up to a dot or the end, or the plain end
    of a name. Raises RulesError for regular expressions that rules cannot have.
    """
    patterns: list[str] = []
    for name in names or ():
        patterns += [f"re:({name})", f"re:({name})\\..*", f"re:.*{re.escape(name)}"]
        patterns += [f"re:{name[:-1]}\\..*"] if name.endswith(".") else []
    return [_rule("not-converted", "modules_to_not_convert", op, KEEP, patterns, [])] if patterns else []


def from_megatron(
    matchers: Mapping[str, Mapping[str, Any]] | Iterable[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any] | None],
    op: Ops = "attention",
) -> list[Rule]:
    """Rules from the matchers of a Megatron-style recipe, by name or as a list, the first match deciding.

    A matcher has config, type ("glob": * is any text, dots too), pattern and enabled (true where it is left out).
    settings: what to apply for each config; None leaves the sites alone, and so does a config of None.
    Raises RulesError for another type, a config that settings lacks, and what rules cannot have.
    """
    if not isinstance(matchers, Mapping):
        matchers = {f"matcher {number}": matcher for number, matcher in enumerate(matchers, start=1)}
    rules: list[Rule] = []
    before: list[str] = []
    for name, matcher in matchers.items():
        if not matcher.get("enabled", True):
            continue
        if matcher.get("type") != "glob" or not isinstance(matcher.get("pattern"), str):
            raise _refused("PP105", f'{name}: only matchers of type "glob" with a pattern can be read')
        config = matcher.get("config")
        if config is not None and config not in settings:
            raise _refused("PP104", f"{name}: no settings for the config {shown(config)}; {advice(config, settings)}")
        pattern = f"re:{_glob(matcher['pattern'])}"
        applied = KEEP if config is None else settings[config]
        rules.append(_rule(f"megatron-{len(rules) + 1}", name, op, applied or KEEP, [pattern], before))
        before = [*before, pattern]
    return rules


def _rule(name: str, source: str, op: Ops, applied: Any, modules: Sequence[str], left_out: Sequence[str]) -> Rule:
    match: dict[str, Any] = {"op": [op] if isinstance(op, str) else list(op)}
    match |= {"module": list(dict.fromkeys(modules))} if modules else {}
    match |= {"not_module": list(dict.fromkeys(left_out))} if left_out else {}
    return Rule(id=name, because=f"imported: {source}"[:1000], match=Match(**match), apply=applied)


def _applied(config: Any, settings: Callable[[Any], Mapping[str, Any] | None]) -> Mapping[str, Any]:
    return (None if config is None else settings(config)) or KEEP


def _exactly(name: str) -> str:
    """A pattern for this name alone."""
    return f"re:{re.escape(name)}" if _GLOB.search(name) else name


def _glob(pattern: str) -> str:
    """As fnmatch reads it, in the regular expressions that rules may have."""
    parts = re.findall(r"\*+|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL)
    return "".join(_glob_part(part) for part in parts)


def _glob_part(part: str) -> str:
    if part[0] == "*":
        return ".*"
    if part == "?":
        return "."
    if part[0] == "[" and len(part) > 2:
        inside = part[1:-1].replace("\\", "\\\\")
        return f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
    return re.escape(part)


def _refused(code: str, message: str) -> RulesError:
    return RulesError([RulesProblem(code, message)])
