"""The JSON Schema of rules files, for editors; generated from the models, kept in rules/rules.schema.json."""

from __future__ import annotations

import json
from typing import Any

from precisionpass.rules.model import RulesFile
from precisionpass.rules.not_yet import NOT_YET_PRODUCTS, NOT_YET_SETTINGS


def schema_text() -> str:
    """The schema as the file holds it: keys in the models' order, two spaces, one newline at the end."""
    schema = RulesFile.model_json_schema(by_alias=True)
    definitions = {name: _tidy(part) for name, part in schema.pop("$defs").items()}
    # An editor marks what this version refuses, and shows what it will be.
    for group, planned in (("Apply", NOT_YET_SETTINGS), ("MatMul", NOT_YET_PRODUCTS)):
        for name, what in planned.items():
            definitions[group]["properties"][name] = {"description": f"Not in this version: {what}.", "not": {}}
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "precisionpass rules"}
    return json.dumps(title | _tidy(schema) | {"$defs": definitions}, indent=2, ensure_ascii=False) + "\n"


def _tidy(part: Any) -> Any:
    """Without the titles pydantic makes up, and without the null or empty list that an absent key is in Python."""
    if isinstance(part, list):
        return [_tidy(one) for one in part]
    if not isinstance(part, dict):
        return part
    tidy = {key: _tidy(value) for key, value in part.items() if key != "title" or not isinstance(value, str)}
    if tidy.get("default", 0) in (None, []):
        del tidy["default"]
    options = tidy.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        options = [option for option in options if option != {"type": "null"}]
        del tidy["anyOf"]
        tidy = (options[0] | tidy) if len(options) == 1 else tidy | {"anyOf": options}
    return tidy
