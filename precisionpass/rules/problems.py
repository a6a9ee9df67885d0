"""From what pydantic found to what a person reads: one code and one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from precisionpass.errors import RulesProblem
from precisionpass.rules.nearest import advice, did_you_mean, shown
from precisionpass.rules.not_yet import NOT_YET_PRODUCTS, NOT_YET_SETTINGS, NOT_YET_VALUES

Path = tuple[str | int, ...]

_TYPES = {
    "bool_type": "true or false",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a group of keys",
    "model_attributes_type": "a group of keys",
    "dict_type": "a group of keys",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_LENGTHS = {
    "too_short": "needs at least {min_length} entry",
    "too_long": "has more than {max_length} entries",
    "string_too_long": "has more than {max_length} characters",
}
_ONLY_IN_PYTHON = {"predicate"}
_TRUTH_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


@dataclass(frozen=True)
class Finding:
    """One problem before it has a place. path: keys and list positions. at_key: the key is wrong, not the value."""

    code: str
    message: str
    path: Path
    at_key: bool = False
    offset: int | None = None


def problems_of(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[RulesProblem]:
    """For models built in Python: the same sentences, without a place. values: what the model was built of."""
    name = values.get("id")
    owner = f" in rule {shown(name)}" if isinstance(name, str) else ""
    return [RulesProblem(finding.code, finding.message) for finding in findings_of(error, model, None, owner)]


def findings_of(error: ValidationError, model: type[BaseModel], data: Any, owner: str = "") -> Iterator[Finding]:
    """Every problem pydantic collected. data: the whole plain file, for the names of rules; owner: of a lone rule."""
    found = error.errors(include_url=False)
    parents = {one["loc"][:-1] for one in found}
    for one in found:
        # A list whose entries were refused counts as empty; only the entries are worth a sentence.
        if one["type"] != "too_short" or one["loc"] not in parents:
            yield _finding(one, model, data, owner)


def _finding(one: Any, model: type[BaseModel], data: Any, owner: str) -> Finding:
    path: Path = tuple(one["loc"])
    kind = one["type"]
    context = one.get("ctx", {})
    owner = owner or _owner(path, data)
    if kind.startswith("PP"):
        at = tuple(context.get("at", ()))
        subject = [part for part in path if isinstance(part, str)]
        named = f"{subject[-1]}{owner}: " if "at" not in context else f"{owner.removeprefix(' in ')}: " if owner else ""
        return Finding(kind, f"{named}{context['message']}", (*path, *at), offset=context.get("offset"))
    if kind == "extra_forbidden":
        return _unknown_key(path, model, owner)
    if kind == "missing":
        hint = "; write version: 1" if path == ("version",) else ""
        return Finding("PP106", f'missing key "{path[-1]}"{owner}{hint}', path[:-1])
    return _bad_value(path, one, owner)


def _unknown_key(path: Path, model: type[BaseModel], owner: str) -> Finding:
    key = str(path[-1])
    known = _keys_at(model, path[:-1])
    planned = NOT_YET_SETTINGS if "implementation" in known else NOT_YET_PRODUCTS if "qk" in known else {}
    if key in planned:
        message = f'setting "{key}"{owner} ({planned[key]}) is not in this version; remove it'
        return Finding("PP107", message, path, at_key=True)
    hint = did_you_mean(key, known) or f"the keys are {', '.join(known)}"
    return Finding("PP103", f"unknown key {shown(key)}{owner}; {hint}", path, at_key=True)


def _bad_value(path: Path, one: Any, owner: str) -> Finding:
    kind, context, value = one["type"], one.get("ctx", {}), one["input"]
    names = [part for part in path if isinstance(part, str)]
    name = names[-1] if names else "the file"
    subject = f'"{name}"{owner}' if names else name
    if len(path) == 2 and isinstance(path[1], int) and owner:
        subject = owner.removeprefix(" in ")
    if path == ("version",):
        return Finding("PP114", f"version {shown(value)} of the rules language is not known; write version: 1", path)
    if kind == "literal_error":
        choices = [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
        if isinstance(value, str) and (name, value) in NOT_YET_VALUES:
            message = f"{shown(value)} for {subject} is not in this version; {NOT_YET_VALUES[name, value]}"
            return Finding("PP107", message, path)
        word = value if isinstance(value, str) else shown(value)
        return Finding("PP105", f"{shown(value)} is no choice for {subject}; {advice(word, choices)}", path)
    if kind == "string_pattern_mismatch":
        return Finding(
            "PP104",
            f"{subject} must be letters, digits, dots, dashes and underscores, at most 80, not {shown(value)}",
            path,
        )
    if kind in _LENGTHS:
        return Finding("PP104", f"{subject} {_LENGTHS[kind].format(**context)}", path)
    if kind in _BOUNDS:
        words, limit = _BOUNDS[kind]
        return Finding("PP104", f"{subject} must be {words} {_number(context[limit])}, not {shown(value)}", path)
    if kind in _TYPES:
        return Finding("PP104", f"{subject} must be {_TYPES[kind]}, not {shown(value)}{_meant(kind, value)}", path)
    return Finding("PP104", f"{subject} cannot be {shown(value)}: {one['msg']}", path)  # what a newer pydantic may add


def _meant(kind: str, value: Any) -> str:
    if kind != "bool_type" or not isinstance(value, str):
        return ""
    truth = _TRUTH_WORDS.get(value.lower())
    if truth:
        return f'; did you mean "{truth}"?'
    near = did_you_mean(value, ("true", "false"))
    return f"; {near}" if near else ""


def _number(limit: float) -> str:
    return f"{limit:g}" if limit != 1_000_000 else "1000000"


def _owner(path: Path, data: Any) -> str:
    """In which rule or group the key stands, as the end of a sentence."""
    if len(path) < 2 or not isinstance(path[1], int):
        return ""
    if path[0] != "rules":
        return f" in entry {path[1] + 1} of {path[0]}"
    rule = data["rules"][path[1]] if isinstance(data, dict) and isinstance(data.get("rules"), Sequence) else None
    name = rule.get("id") if isinstance(rule, dict) else None
    return f" in rule {shown(name)}" if isinstance(name, str) else f" in rule {path[1] + 1}"


def _keys_at(model: type[BaseModel], path: Path) -> list[str]:
    """The keys that would have been right there."""
    for part in path:
        if isinstance(part, int):
            continue
        field = next(field for name, field in model.model_fields.items() if part in (name, field.alias))
        model = next(_models_in(field.annotation))
    return [field.alias or name for name, field in model.model_fields.items() if name not in _ONLY_IN_PYTHON]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
