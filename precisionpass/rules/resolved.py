"""A set of rules as one file: what was extended merged in, in the order in which it counts, and who set what."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from precisionpass.rules.model import Rule
from precisionpass.rules.predicate import name_of
from precisionpass.rules.ruleset import RuleSet

# What needs no quotes in any YAML: words with dots, dashes and slashes, but nothing that a reader takes for a truth.
_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_TRUTHS = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null)")


def resolved_text(rules: RuleSet) -> str:
    """The rules as YAML that means the same when it is loaded again, each with the file and line it comes from.

    A predicate, which only Python can hold, is named in a comment.
    """
    lines = [
        f"# The rules of {_comment(rules.name)} as they were applied, with what they extend. The first rule to set a "
        "setting wins.",
        f"# digest: {rules.digest}",
        "version: 1",
        f"on_unmatched: {rules.on_unmatched}",
        f"on_refused: {rules.on_refused}",
        f"on_unexpected: {rules.on_unexpected}",
        "rules:" if rules.rules else "rules: []",
    ]
    for rule in rules.rules:
        lines += [f"  {line}" for line in _rule(rule)]
    lines += ["expect:"] if rules.expect else []
    lines += [f"  - {_value(one.model_dump(exclude_none=True))}" for one in rules.expect]
    return "\n".join(lines) + "\n"


def _rule(rule: Rule) -> Iterator[str]:
    origin = rule.origin
    yield f"- id: {_value(rule.id)}  # {_comment(origin.file)}{f':{origin.line}' if origin.line else ''}"
    if rule.because:
        yield f"  because: {_value(rule.because)}"
    if not rule.enabled:
        yield "  enabled: false"
    if rule.match is not None:
        yield "  match:"
        for name, value in rule.match.model_dump(by_alias=True, exclude={"predicate"}, exclude_none=True).items():
            if value != ():
                yield f"    {name}: {_value(value)}"
        if rule.match.predicate is not None:
            yield f"    # and, in Python: {_comment(name_of(rule.match.predicate))}"
    if rule.apply is not None:
        yield "  apply:"
        for name, value in rule.apply.given().items():
            line = origin.setting_lines.get(name)
            place = f"  # {_comment(origin.file)}:{line}" if line else ""
            yield f"    {name}: {'off' if value is None else _value(value)}{place}"


def _value(value: Any) -> str:
    """A value in YAML's flow style, on one line, in ASCII."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else json.dumps(str(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(str(name))}: {_value(held)}" for name, held in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    text = str(value)
    return text if _BARE.fullmatch(text) and not _TRUTHS.fullmatch(text) else json.dumps(text)


def _comment(text: str) -> str:
    """Text that cannot leave its line."""
    return text.encode("unicode_escape").decode("ascii")
