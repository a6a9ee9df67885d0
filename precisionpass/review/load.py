"""Read a review back: the report from report.json, and the code and rules that lie beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from precisionpass.errors import PrecisionPassError
from precisionpass.review.html import RESOLVED
from precisionpass.review.plain import shown
from precisionpass.review.report import SCHEMA_VERSION, NearMissRecord, Report, SiteRecord

_CODE = re.compile(r"graph_[0-9][0-9.]*\.(before|after)\.py")
FIGURES = ("old_error", "new_error", "old_bias", "new_bias")
_PLAIN = {"str": str, "int": int, "tuple[str, ...]": tuple}


def load_review(source: str | os.PathLike[str]) -> Report:
    """The report of a review folder, or of a report.json alone. artifacts: graphs as code and the rules, where there.

    Raises PrecisionPassError for what is no review, or one of another version of the format.
    """
    place = Path(source)
    folder = place if place.is_dir() else None
    try:
        content = json.loads((place / "report.json" if folder else place).read_text(encoding="utf-8"))
        found = [] if folder is None else sorted(one for one in folder.iterdir() if _is_code(one.name))
        artifacts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in found}
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(place, getattr(error, "strerror", None) or "its report.json is not JSON") from None
    if not isinstance(content, dict) or "schema_version" not in content:
        raise _unreadable(place, "its report.json is not a report")
    if content["schema_version"] != SCHEMA_VERSION:
        version = shown(content["schema_version"], 20)
        raise _unreadable(place, f"its schema_version is {version}, and this version reads {SCHEMA_VERSION}")
    try:
        del content["schema_version"]
        return _report(content, artifacts)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _unreadable(place, f"its report.json does not hold what a report holds: {shown(error)}") from None


def _report(content: dict[str, Any], artifacts: dict[str, str]) -> Report:
    sites = tuple(_record(SiteRecord, one) for one in content.pop("sites"))
    misses = tuple(_record(NearMissRecord, one) for one in content.pop("near_misses"))
    texts = {
        name: tuple(content.pop(name)) for name in ("unused_rules", "events", "failed_expectations") if name in content
    }
    if not all(isinstance(text, str) for held in texts.values() for text in held):
        raise TypeError("a list of text holds something else")
    return Report(sites=sites, near_misses=misses, **texts, **_checked(Report, content), artifacts=artifacts)


def _record(kind: type, content: object) -> Any:
    if not isinstance(content, dict):
        raise TypeError("a record is no mapping")
    required = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    if not required <= set(content):
        raise KeyError(f"a record without {sorted(required - set(content))[0]}")
    rules = content.get("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise TypeError("the rules of a record are no list of text")
    checked: dict[str, Any] = content | ({"rules": tuple(rules)} if "rules" in content else {})
    if "measured" in content:  # what is not finite is written as text
        figures = content["measured"].items()
        checked["measured"] = {name: {one: float(held[one]) for one in FIGURES} for name, held in figures}
    return kind(**_checked(kind, checked))


def _checked(kind: type, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields as they are, if their plain types are right."""
    types = {one.name: _PLAIN.get(str(one.type), Mapping) for one in fields(kind) if one.compare}
    for name, value in content.items():
        if name not in types or not isinstance(value, types[name]):
            raise TypeError(f"{name} is no {types[name].__name__}" if name in types else f"no field is called {name}")
    for setting in content.get("settings", {}).values():
        if not isinstance(setting, Mapping):
            raise TypeError("a setting is no mapping")
    return content


def _is_code(name: str) -> bool:
    return name == RESOLVED or _CODE.fullmatch(name) is not None


def _unreadable(place: Path, why: str) -> PrecisionPassError:
    return PrecisionPassError(
        "this is no review that can be read",
        where=shown(place),
        why=why,
        fix="give a folder that precisionpass wrote (review=, --review or report.save), or its report.json",
        code="PP302",
    )
