"""Files in, RuleSets out: what is read, what is merged, what the digest sees. The refusals are in test_messages.py."""

import copy
import pickle

import pytest

from precisionpass.errors import RulesError
from precisionpass.rules import Match, Rule, load

ONE = "rules:\n- {id: one, match: {op: attention}, apply: {implementation: auto}}\n"


def applied(ruleset, index=0):
    return ruleset.rules[index].apply.given()


def test_a_full_rule(rules):
    loaded = rules(
        """
        rules:
          - id: full
            because: it shows every key
            enabled: true
            match:
              op: [attention, rms_norm]
              module: [model.layers.*.self_attn, "re:vision\\\\..*"]
              not_module: model.layers.0.**
              class: "*Attention"
              where: dtype == bf16 and seq_q >= 1024
              training: true
            apply:
              implementation: triton
              grad_clip: {kind: norm, max: 1e2, on_nonfinite: zero}
        expect:
          - {rule: full, sites: 12, max_refused: 0}
        on_refused: error
        on_unmatched: keep
        """.replace("\n        ", "\n")
    )
    (rule,) = loaded.rules
    assert (rule.id, rule.because, rule.enabled) == ("full", "it shows every key", True)
    assert rule.match.op == ("attention", "rms_norm")
    assert rule.match.module == ("model.layers.*.self_attn", r"re:vision\..*")
    assert rule.match.class_ == ("*Attention",)
    assert rule.match.condition.names == ("dtype", "seq_q")
    grad_clip = {"kind": "norm", "max": 100.0, "on_nonfinite": "zero"}
    assert rule.apply.given() == {"grad_clip": grad_clip, "implementation": "triton"}
    assert (loaded.name, loaded.on_refused, loaded.on_unmatched, loaded.is_off) == ("rules", "error", "keep", False)
    assert loaded.expect[0].sites == 12
    assert rule.origin.line == 4
    assert rule.origin.setting_lines == {"implementation": 15, "grad_clip": 16}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e2", 100.0), ("1.5E+1", 15.0), (".5", 0.5), ("7.", 7.0), ("3", 3.0), ("+3", 3.0), ("off", None),
    ],
)  # fmt: skip
def test_numbers_and_off_mean_what_they_look_like(rules, written, value):
    text = f"rules: [{{id: a, match: {{op: attention}}, apply: {{output_clip: {written}, implementation: auto}}}}]"
    assert applied(rules(text))["output_clip"] == value


@pytest.mark.parametrize("word", ["no", "on", "yes", "y", "NO", "0x10", "1_000", "012", "1:30", "2024-01-01", ".inf"])
def test_words_stay_words(rules, word):
    loaded = rules(ONE.replace("id: one", f"id: one, because: {word}"))
    assert loaded.rules[0].because == word


def test_off_as_a_preset_needs_no_quotes(rules):
    assert rules("extends: off\n").is_off


def test_crlf_byte_order_mark_and_non_ascii(tmp_path):
    path = tmp_path / "ünïcode.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + f"version: 1\n# é\n{ONE}".replace("\n", "\r\n").encode())
    assert load(str(path)).rules[0].origin.line == 4


def test_own_rules_come_before_those_of_what_is_extended(rules):
    base = ONE + "on_refused: error\non_unmatched: error\nexpect: [{min_sites: 1}]\n"
    own = "extends: base.yaml\non_refused: keep\n" + ONE.replace("one", "two")
    loaded = rules(own, {"base.yaml": base})
    assert [rule.id for rule in loaded.rules] == ["two", "one"]
    assert (loaded.on_refused, loaded.on_unmatched, len(loaded.expect)) == ("keep", "error", 1)
    assert loaded.rules[1].origin.file.endswith("base.yaml")


def test_a_rule_of_the_same_id_replaces_the_extended_one(rules):
    loaded = rules("extends: stable-bf16\nrules: [{id: attention-unbiased, enabled: false}]\n")
    assert {rule.id: rule.enabled for rule in loaded.rules} == {
        "attention-unbiased": False, "softmax-fp32": True, "norms-fp32": True,
    }  # fmt: skip


def test_two_bases_may_share_a_third_or_the_same_rule(rules):
    bases = {"left.yaml": "extends: base.yaml", "right.yaml": "extends: base.yaml", "base.yaml": ONE}
    assert [rule.id for rule in rules("extends: [left.yaml, right.yaml]", bases).rules] == ["one"]
    assert len(rules("extends: [stable-bf16, fp32-statistics]").rules) == 3


def test_extends_is_relative_to_the_file_not_to_the_folder_one_is_in(rules, tmp_path, monkeypatch):
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "base.yaml").write_text("version: 1\nextends: ../top.yaml\n")
    monkeypatch.chdir("/")
    loaded = rules("extends: team/base.yaml", {"top.yaml": ONE})
    assert [rule.id for rule in loaded.rules] == ["one"]


def test_the_digest_is_the_meaning(rules):
    first = rules("rules:\n- {id: a, match: {op: [attention, softmax], where: seq_q >= 1}, apply: {lowering: auto}}\n")
    same = rules(
        "# a comment\nrules:\n- apply: {lowering: auto}\n  because: of this\n"
        "  match: {where: 'seq_q   >=  1', op: [softmax, attention]}\n  id: a\n- {id: gone, enabled: false}\n"
    )
    assert first.digest == same.digest
    assert len(first.digest) == 64
    others = [
        "rules:\n- {id: b, match: {op: [attention, softmax], where: seq_q >= 1}, apply: {lowering: auto}}\n",
        "rules:\n- {id: a, match: {op: [attention], where: seq_q >= 1}, apply: {lowering: auto}}\n",
        "rules:\n- {id: a, match: {op: [attention, softmax], where: seq_q > 1}, apply: {lowering: auto}}\n",
        "rules:\n- {id: a, match: {op: [attention, softmax], where: seq_q >= 1}, apply: {lowering: kernel}}\n",
        "on_refused: error\nrules:\n"
        "- {id: a, match: {op: [attention, softmax], where: seq_q >= 1}, apply: {lowering: auto}}\n",
    ]
    assert len({first.digest, *(rules(other).digest for other in others)}) == 6


def test_the_digest_is_the_same_in_every_process():
    assert load("off").digest.startswith("caadb1c6")


def test_rule_sets_can_be_copied_and_pickled():
    loaded = load("stable-bf16")
    for twin in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert twin == loaded
        assert (twin.digest, twin.rules[0].origin) == (loaded.digest, loaded.rules[0].origin)


def test_python_rules():
    rule = Rule(id="mine", match=Match(op="attention", class_="MyAttention"), apply={"delta": "recompute"})
    loaded = load([rule])
    assert (loaded.name, loaded.rules) == ("python", (rule,))
    assert load(loaded) is loaded
    assert load([rule]).digest == loaded.digest
    setting = loaded.resolve("attention", "block", "my.MyAttention", True, lambda _: True).settings["delta"]
    assert (setting.value, setting.rule, setting.file, setting.line) == ("recompute", "mine", "python", 0)


def test_python_rules_are_refused_in_the_words_of_rules_files():
    with pytest.raises(RulesError) as raised:
        Rule(id="mine", match={"op": "atention"}, apply={"autotune": True, "statistic": "float32"})
    assert [problem.code for problem in raised.value.problems] == ["PP105", "PP107", "PP103"]
    assert str(raised.value).splitlines() == [
        'PP105 "atention" is no choice for "op" in rule "mine"; did you mean "attention"?',
        'PP107 setting "autotune" in rule "mine" (measuring launch parameters instead of taking them from a table) is '
        "not in this version; remove it",
        'PP103 unknown key "statistic" in rule "mine"; did you mean "statistics"?',
    ]
    with pytest.raises(RulesError, match='PP110 two rules have the id "twin"'):
        load([Rule(id="twin", match=Match(op="softmax"), apply={"lowering": "auto"})] * 2)
    with pytest.raises(TypeError, match="a preset's name, a path, a list of Rule or a RuleSet, not int"):
        load(3)  # type: ignore[arg-type]


def test_models_do_not_change():
    rule = load("watch").rules[0]
    with pytest.raises(ValueError, match="frozen"):
        rule.id = "other"
