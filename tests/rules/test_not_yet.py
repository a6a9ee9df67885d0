"""What the language will have and this version has not: refused by name, in files and in Python, never ignored."""

import pytest

from precisionpass import Match, Rule
from precisionpass.errors import RulesError
from precisionpass.rules import load
from precisionpass.rules.not_yet import NOT_YET_PRESETS, NOT_YET_PRODUCTS, NOT_YET_SETTINGS, NOT_YET_VALUES

# As a person would write them.
SETTINGS = {
    "autotune": "false",
    "budget": "{forward: 1e-3}",
    "kv_cache": "fp8_e4m3",
    "mask_dtype": "float32",
}
VALUES = {("op", "linear"), ("recipe", "delayed")}


def test_they_are_all_here():
    assert set(SETTINGS) == set(NOT_YET_SETTINGS)
    assert set(NOT_YET_VALUES) == VALUES
    assert set(NOT_YET_PRESETS) == {"fp8-linear"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_refused_by_name_even_where_it_asks_for_nothing(name, rules):
    text = f"rules:\n- id: r\n  match: {{op: attention}}\n  apply:\n    delta: output\n    {name}: {SETTINGS[name]}\n"
    with pytest.raises(RulesError) as raised:
        rules(text)
    (problem,) = raised.value.problems
    what = NOT_YET_SETTINGS[name]
    assert problem.message == f'setting "{name}" in rule "r" ({what}) is not in this version; remove it'
    assert (problem.code, problem.line, problem.column) == ("PP107", 7, 5)
    with pytest.raises(RulesError, match=f'PP107 setting "{name}"'):
        Rule(id="r", match=Match(op="attention"), apply={"delta": "output", name: 1})


@pytest.mark.parametrize(("name", "value"), sorted(VALUES))
def test_a_value_is_refused_by_name(name, value, rules):
    written = f"matmul: {{qk: fp8_e4m3, recipe: {value}}}" if name == "recipe" else f"{name}: {value}"
    op, setting = (value, "delta: output") if name == "op" else ("attention", written)
    with pytest.raises(RulesError, match=rf'PP107 "{value}" for "{name}" in rule "r" is not in this version'):
        rules(f"rules: [{{id: r, match: {{op: {op}}}, apply: {{{setting}}}}}]")


@pytest.mark.parametrize("name", sorted(NOT_YET_PRESETS))
def test_a_preset_is_refused_by_name(name, rules):
    for refused in (lambda: load(name), lambda: rules(f"extends: {name}")):
        with pytest.raises(RulesError, match=f'PP107 the preset "{name}" is not in this version: linear layers'):
            refused()


@pytest.mark.parametrize("name", NOT_YET_PRODUCTS)
def test_a_product_of_the_backward_is_refused_by_name(name, rules):
    with pytest.raises(RulesError, match=rf'PP107 setting "{name}" in rule "r" \(FP8 in '):
        rules(f"rules: [{{id: r, match: {{op: attention}}, apply: {{matmul: {{qk: fp8_e4m3, {name}: fp8_e5m2}}}}}}]")
    with pytest.raises(RulesError, match=rf'PP107 setting "{name}"'):
        Rule(id="r", match=Match(op="attention"), apply={"matmul": {name: "fp8_e5m2"}})
