"""The JSON Schema and the settings are one description: the models."""

import json
from pathlib import Path
from typing import get_args

import pytest

from precisionpass.rules import facts, model, settings
from precisionpass.rules.not_yet import NOT_YET_SETTINGS
from precisionpass.rules.schema import schema_text

FILE = Path(__file__).parents[2] / "rules" / "rules.schema.json"


def test_the_schema_file_is_true():
    written = json.loads(FILE.read_text(encoding="utf-8"))
    assert written == json.loads(schema_text()), "python -m precisionpass schema > rules/rules.schema.json"


def test_every_key_has_a_description():
    schema = json.loads(schema_text())
    parts = [schema, *schema["$defs"].values()]
    assert len(parts) == 12
    for part in parts:
        assert part["additionalProperties"] is False
        assert all(key["description"].endswith(".") for key in part["properties"].values())


def test_every_setting_has_its_default_in_the_schema():
    properties = json.loads(schema_text())["$defs"]["Apply"]["properties"]
    refused = {name: properties.pop(name) for name in NOT_YET_SETTINGS}
    assert all(part["description"].startswith("Not in this version: ") for part in refused.values())
    assert all(part["not"] == {} for part in refused.values()), "an editor marks them"
    defaults = {name: value for op in settings.OPS for name, value in settings.defaults(op).items()}
    assert {name: key["default"] for name, key in properties.items()} == {
        name: "off" if value in (None, ()) else value for name, value in defaults.items()
    }


def test_the_words_for_ops_agree():
    assert get_args(model.BuiltIn) == settings.OPS
    assert get_args(get_args(settings.Implementation)[0]) == settings.IMPLEMENTATIONS
    assert all(set(fact.ops) <= set(settings.OPS) for fact in facts.FACTS.values())


def test_defaults_by_kind():
    assert settings.defaults("rms_norm") == {
        "implementation": "auto", "lowering": "auto", "deterministic": True, "prescale": False, "statistics": "float32",
        "grad_clip": None,
    }  # fmt: skip
    assert set(settings.defaults("attention")) == set(settings.Apply.model_fields) - {"prescale"}


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        ("statistics", "float32", True), ("delta", "output", True), ("dead_rows", "zero", True),
        ("dead_rows", "same", False), ("logit_clip", None, False), ("implementation", "auto", False),
        ("lowering", "kernel", False), ("deterministic", False, False), ("probabilities", "never", False),
        ("output_clip", 3.0, True), ("prescale", True, True), ("prescale", False, False),
        ("row_max_shift", {"beta": 2.0}, True), ("matmul", {"qk": "fp8_e4m3"}, True), ("on_missing_fp8", "bf16", False),
    ],
)  # fmt: skip
def test_which_settings_change_numbers(name, value, changes):
    assert settings.changes_numbers(name, value) is changes
