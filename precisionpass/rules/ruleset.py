"""A loaded set of rules: what it says of one site, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from precisionpass.rules.condition import Condition
from precisionpass.rules.model import Expect, OnTrouble, Rule
from precisionpass.rules.predicate import Predicate, identity
from precisionpass.rules.settings import changes_numbers, defaults, has


@dataclass(frozen=True)
class Setting:
    """A value with the rule that set it. value: plain data; a group is a dict, off is None. line: 0 in Python."""

    value: Any
    rule: str
    file: str
    line: int


@dataclass(frozen=True)
class Resolved:
    """What the rules say of one site. settings: those a rule set. rules: ids of all that match, strongest first."""

    kind: str
    settings: dict[str, Setting]
    rules: tuple[str, ...]

    def value(self, name: str) -> Any:
        """The value of a setting, else its default. Raises KeyError for a setting this kind does not have."""
        return self.settings[name].value if name in self.settings else defaults(self.kind)[name]

    def values(self) -> dict[str, Any]:
        """Every setting this kind has, by name, defaults filled in."""
        return defaults(self.kind) | {name: setting.value for name, setting in self.settings.items()}

    @property
    def rewrites(self) -> bool:
        """Whether the site is to be rewritten: an implementation other than keep, or a setting that changes numbers."""
        chosen = self.settings.get("implementation")
        if chosen is not None:
            return chosen.value != "keep"
        return any(changes_numbers(name, setting.value) for name, setting in self.settings.items())


@dataclass(frozen=True)
class RuleSet:
    """Rules in the order in which they count, own before extended ones.

    name: the preset, or the file's stem. rules: disabled ones included; `resolve` passes them over.
    """

    name: str
    rules: tuple[Rule, ...]
    expect: tuple[Expect, ...] = ()
    on_unmatched: OnTrouble = "warn"
    on_refused: OnTrouble = "warn"
    on_unexpected: OnTrouble = "warn"

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over what the rules mean: ids, matches, settings, expectations; not over comments, reasons,
        places, the order of keys, or disabled rules.
        """
        return _digest(self)

    @property
    def is_off(self) -> bool:
        """No rule can match: nothing is searched, nothing is changed."""
        return not any(rule.enabled for rule in self.rules)

    def resolve(
        self,
        kind: str,
        module: str,
        class_name: str,
        training: bool,
        holds: Callable[[Condition], bool],
        says: Callable[[Predicate, str], bool] | None = None,
    ) -> Resolved:
        """Merge the settings of every rule that matches a site; the first rule to set a setting wins.

        kind: one of settings.OPS. module: dotted name, "" for the root. holds: asked about where conditions only
        after all else matched, so that no condition is guarded without need. says: asked last, with a predicate and the
        id of its rule; without it a rule that has a predicate does not match.
        """
        settings: dict[str, Setting] = {}
        matched: list[str] = []
        for rule in self.rules:
            if not rule.enabled or rule.match is None or rule.apply is None:
                continue
            if not rule.match.accepts(kind, module, class_name, training):
                continue
            condition = rule.match.condition
            if condition is not None and not holds(condition):
                continue
            predicate = rule.match.predicate
            if predicate is not None and not (says and says(predicate, rule.id)):
                continue
            matched.append(rule.id)
            for name, value in rule.apply.given().items():
                if has(kind, name, value) and name not in settings:
                    line = rule.origin.setting_lines.get(name, rule.origin.line)
                    settings[name] = Setting(value, rule.id, rule.origin.file, line)
        return Resolved(kind, dict(sorted(settings.items())), tuple(matched))


def _digest(rules: RuleSet) -> str:
    meaning = {
        "version": 1,
        "rules": [_meaning(rule) for rule in rules.rules if rule.enabled],
        "expect": [one.model_dump() for one in rules.expect],
        "on_unmatched": rules.on_unmatched,
        "on_refused": rules.on_refused,
        "on_unexpected": rules.on_unexpected,
    }
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _meaning(rule: Rule) -> dict[str, Any]:
    match = rule.match.model_dump(exclude={"predicate"}) if rule.match else {}
    condition = rule.match.condition if rule.match else None
    sets = {key: sorted(value) for key, value in match.items() if isinstance(value, tuple)}
    if rule.match and rule.match.predicate:
        match["predicate"] = identity(rule.match.predicate)
    return {
        "id": rule.id,
        "match": match | sets | {"where": condition.tree if condition else None},
        "apply": rule.apply.given() if rule.apply else {},
    }
