"""The rules in one file: they mean the same, and each says who wrote it."""

import re

import pytest

from precisionpass import Rule
from precisionpass.rules import load, presets
from precisionpass.rules.not_yet import NOT_YET_PRESETS
from precisionpass.rules.resolved import resolved_text

OWN = """
extends: stable-bf16
rules:
  - id: first
    because: "a: b # c"
    match:
      {op: [attention, softmax], module: "re:h\\\\.[0-9]+", not_module: 'y', class: [A*, "no"], where: seq_q > 2,
       training: true}
    apply: {implementation: keep}
  - id: norms-fp32
    enabled: false
  - id: clips
    match: {op: attention}
    apply: {output_clip: 2.5, row_max_shift: off, logit_clip: {kind: tanh, max: 30}, deterministic: false}
expect:
  - {op: attention, sites: 12, max_refused: 0}
  - {rule: first, min_sites: 1}
on_refused: error
on_unexpected: keep
"""


@pytest.mark.parametrize("name", [name for name in presets.names() if name not in NOT_YET_PRESETS])
def test_a_preset_means_the_same(name, tmp_path):
    assert reloaded(load(name), tmp_path) == load(name).digest


def test_what_a_file_extends_is_merged_in(rules, tmp_path):
    merged = rules(OWN)
    assert reloaded(merged, tmp_path) == merged.digest
    text = resolved_text(merged)
    assert "\nextends" not in text
    assert re.findall(r"- id: (\S+)  # \S*?([\w.-]+:\d+)", text) == [
        ("first", "rules.yaml:5"), ("norms-fp32", "rules.yaml:11"), ("clips", "rules.yaml:13"),
        ("attention-unbiased", "stable-bf16.yaml:22"), ("softmax-fp32", "stable-bf16.yaml:37"),
    ]  # fmt: skip
    assert re.search(r"output_clip: 2.5  # \S*rules.yaml:15\n", text)
    assert "row_max_shift: off" in text


def test_rules_in_python_say_so_and_name_their_predicate():
    def wide(facts, module):
        return facts["head_dim"] > 64

    rule = Rule(id="own", match={"op": "attention", "predicate": wide}, apply={"implementation": "auto"})
    text = resolved_text(load([rule]))
    assert "- id: own  # python\n" in text
    assert "# and, in Python: " in text and "wide" in text


def test_a_reason_of_any_text_cannot_leave_its_line(tmp_path):
    reason = "x\n  - id: evil\r\u2028\u202e\"'\\ # : {}[]" + "é" * 30
    rules = load([Rule(id="a", because=reason, match={"op": "softmax"}, apply={"statistics": "float32"})])
    text = resolved_text(rules)
    assert text.isascii() and text.count("\n  - id:") == 1
    file = tmp_path / "resolved.yaml"
    file.write_text(text)
    assert load(file).rules[0].because == reason


def reloaded(rules, folder) -> str:
    file = folder / "resolved.yaml"
    file.write_text(resolved_text(rules))
    return load(file).digest
