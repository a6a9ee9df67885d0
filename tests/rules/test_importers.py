"""Names and patterns of other libraries pick the same modules as there."""

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precisionpass.errors import RulesError
from precisionpass.rules import load
from precisionpass.rules.importers import from_megatron, from_modules_to_not_convert, from_torchao

NAMES = [
    "model", "model.layers.0.attn", "model.layers.1.attn", "model.layers.10.attn", "model.layers.1.mlp.fc1", "lm_head",
    "model.vision.attn", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "visionx.attn", "vision.a.b",
]  # fmt: skip


def applied(rules, module, kind="attention"):
    resolved = load(list(rules)).resolve(kind, module, "M", True, lambda condition: True)
    return {name: setting.value for name, setting in resolved.settings.items()}, resolved.rules


def output(value):
    return {"delta": value} if value else None


def test_torchao_keys():
    rules = from_torchao(
        {
            "_default": "output", "re:model\\.layers\\..*attn": "recompute", "model.layers.0.attn": "residual",
            "re:.*\\.10\\..*": "output", "model.vision.attn": None,
        },
        output,
    )  # fmt: skip
    assert {name: applied(rules, name)[0] for name in NAMES[1:7]} == {
        "model.layers.0.attn": {"delta": "residual"}, "model.layers.1.attn": {"delta": "recompute"},
        "model.layers.10.attn": {"delta": "recompute"}, "model.layers.1.mlp.fc1": {"delta": "output"},
        "lm_head": {"delta": "output"}, "model.vision.attn": {"implementation": "keep"},
    }  # fmt: skip
    assert all(len(applied(rules, name)[1]) == 1 for name in NAMES)
    assert [rule.because for rule in rules][-1] == "imported: _default"
    assert from_torchao({}, output) == from_torchao({"_default": None}, output) == []
    assert applied(from_torchao({"a[0]": "output"}, output), "a[0]")[0] == {"delta": "output"}
    with pytest.raises(RulesError, match="cannot be read"):
        from_torchao({"re:(": "output"}, output)


def not_converted(name, keys):
    """What transformers 5 does, in its own words."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(rf"(?:{key}){boundary}", name) or name.endswith(key) for key in keys)


@pytest.mark.parametrize(
    "keys",
    [
        ["lm_head"], ["model.layers.1"], ["fc1"], ["model.layers.*"], ["mlp.gate"], ["model.layers.1.mlp.gate"],
        ["vision"], ["vision."], ["vision|lm_head"], ["model.layers.1$"], ["attn", "model.vision"], [],
        [r"model\.layers\.\d+\.attn"],
    ],
)  # fmt: skip
def test_modules_to_not_convert(keys):
    rules = from_modules_to_not_convert(keys)
    left_alone = [name for name in NAMES if applied(rules, name, "rms_norm")[0] == {"implementation": "keep"}]
    assert left_alone == [name for name in NAMES if not_converted(name, keys)]


def test_no_modules_to_not_convert():
    assert from_modules_to_not_convert(None) == []


def test_megatron_matchers():
    matchers = {
        "first": {"config": "none", "type": "glob", "pattern": "*layers.0.*", "enabled": True},
        "unused": {"config": "off", "type": "glob", "pattern": "*", "enabled": False},
        "attention": {"config": "low", "type": "glob", "pattern": "*.attn", "enabled": True},
        "nothing": {"config": None, "type": "glob", "pattern": "lm_hea?"},
        "default": {"config": "rest", "type": "glob", "pattern": "*"},
    }
    settings = {"none": None, "low": {"delta": "recompute"}, "rest": {"delta": "output"}}
    for rules in (from_megatron(matchers, settings), from_megatron(list(matchers.values()), settings)):
        assert {name: applied(rules, name)[0] for name in (*NAMES[1:3], *NAMES[4:6])} == {
            "model.layers.0.attn": {"implementation": "keep"}, "model.layers.1.attn": {"delta": "recompute"},
            "model.layers.1.mlp.fc1": {"delta": "output"}, "lm_head": {"implementation": "keep"},
        }  # fmt: skip
        assert all(len(applied(rules, name)[1]) == 1 for name in NAMES)


@pytest.mark.parametrize(
    ("matcher", "message"),
    [
        ({"config": "lo", "type": "glob", "pattern": "*"}, 'matcher 1: no settings for the config "lo"; did you mean'),
        ({"config": "low", "type": "regex", "pattern": "*"}, 'matcher 1: only matchers of type "glob" with a pattern'),
        ({"config": "low", "type": "glob"}, 'only matchers of type "glob" with a pattern'),
    ],
)  # fmt: skip
def test_megatron_matchers_that_cannot_be_read(matcher, message):
    with pytest.raises(RulesError, match=message):
        from_megatron([matcher], {"low": {"delta": "output"}})


@given(st.text("ab.*?[]!-", min_size=1, max_size=6), st.text("ab.-", max_size=6))
def test_globs_mean_what_fnmatch_says(pattern, name):
    try:
        rules = from_megatron([{"config": "c", "type": "glob", "pattern": pattern}], {"c": {"delta": "output"}})
    except RulesError:
        return  # a set that regular expressions do not have, such as [b-a]
    assert bool(applied(rules, name)[1]) == fnmatch.fnmatchcase(name, pattern)
