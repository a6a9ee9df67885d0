"""Rules without effect: found where that is proved, with their place, and nothing said where it is not."""

import sys
from pathlib import Path

import pytest

from precisionpass import Match, Rule, cli
from precisionpass.rules import load, presets
from precisionpass.rules.codes import CODES
from precisionpass.rules.lint import RECOMPILE_LIMIT, Modules, lint
from precisionpass.rules.not_yet import NOT_YET_PRESETS

MODEL = Modules(("", "layers.0.attn", "layers.1.attn", "layers.0.mlp", "norm"), ("Attention", "Norm", "mine.Attention"))
AUTO = {"implementation": "auto"}


def rule(name, apply=AUTO, **match):
    return Rule(id=name, match=Match(**{"op": "attention"} | match), apply=apply)


def found(*rules, modules=None):
    problems = lint(load(list(rules)), modules)
    assert all(problem.code in CODES for problem in problems)
    return [f"{problem.code} {problem.message}" for problem in problems]


@pytest.mark.parametrize("name", [name for name in presets.names() if name not in NOT_YET_PRESETS])
def test_the_presets_are_clean(name):
    assert lint(load(name), MODEL) == ()


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ({"where": "seq_q > 8 and seq_q < 4"}, "matches no site: its condition never holds"),
        (
            {"where": "training", "training": False},
            "matches no site: its condition never holds while training is false",
        ),
        ({"module": "a.*", "not_module": ["b", "a.*"]}, "matches no site: not_module leaves out all of module"),
        ({"not_module": "**"}, "matches no site: not_module leaves out all of module"),
    ],
)  # fmt: skip
def test_rules_that_match_nothing(match, message):
    assert found(rule("r", **match)) == [f'PP201 rule "r" {message}']


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ({}, {}), ({}, {"where": "seq_q > 3"}), ({"where": "seq_q > 3"}, {"where": "seq_q > 4 and causal"}),
        ({"op": ["attention", "softmax"]}, {"module": "a.**", "training": True}), ({"module": "**"}, {"module": "a"}),
        ({"module": ["a", "b"]}, {"module": "b", "class_": "X"}), ({"where": "training"}, {"training": True}),
        ({"not_module": "a"}, {"not_module": ["b", "a"]}),
    ],
)  # fmt: skip
def test_rules_that_earlier_ones_shadow(wide, narrow):
    message = 'PP202 rule "narrow" sets nothing: rule "wide" (python) matches wherever it does and sets the same first'
    assert found(rule("wide", **wide), rule("narrow", **narrow)) == [message]
    if wide != narrow:
        assert found(rule("narrow", **narrow), rule("wide", **wide)) == []


def test_a_rule_may_be_shadowed_by_several_together():
    rules = [
        rule("one", {"delta": "output"}), rule("two", {"dead_rows": "nan"}),
        rule("both", {"delta": "residual", "dead_rows": "zero"}, module="a"),
    ]  # fmt: skip
    assert found(*rules) == [
        'PP202 rule "both" sets nothing: rule "one" (python) and rule "two" (python) match wherever it does and set '
        "the same first"
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"where": "seq_q > 4"}, {"where": "seq_q > 3"}), ({"training": True}, {}), ({"module": "a"}, {"module": "b"}),
        ({"predicate": lambda facts, module: True}, {}), ({"not_module": "a"}, {}), ({"class_": "X"}, {}),
        ({"where": "heads > 0 or heads == 0"}, {"op": ["attention", "softmax"]}),
        ({"op": ["softmax", "attention"], "where": "seq_q >= 0"}, {"op": "softmax"}),
    ],
)  # fmt: skip
def test_what_is_not_proved_is_not_said(first, second):
    assert found(rule("first", **first), rule("second", **second)) == []


def test_patterns_without_a_module_have_the_nearest_names():
    rules = [rule("r", module=["layers.*.atn", "norm", "**"], not_module="re:nrm", class_=["Atention", "*.Attention"])]
    assert found(*rules, modules=MODEL) == [
        'PP203 rule "r" module "layers.*.atn" matches no module of the model; the nearest are "layers.0.attn", '
        '"layers.1.attn" and "layers.0.mlp"',
        'PP203 rule "r" not_module "re:nrm" matches no module of the model; the nearest are "norm", "layers.0.mlp" and '
        '"layers.0.attn"',
        'PP204 rule "r" class "Atention" is no module\'s class in the model; the nearest are "Attention" and "Norm"',
    ]
    assert "the model has no named modules" in found(rule("r", module="a"), modules=Modules(("",), ()))[0]


def test_contradictions_that_are_bound_to_happen():
    shift, exact = {"row_max_shift": {}}, {"normaliser": "float32"}
    assert found(rule("shift", shift, module="a"), rule("exact", exact)) == [
        'PP205 rule "shift" has contradictory settings at every attention site: rule "shift" (python) sets '
        'row_max_shift and rule "exact" (python) sets normaliser; row_max_shift needs normaliser "rounded": a shift '
        'with "float32" biases every output'
    ]
    perhaps = rule("perhaps", {"normaliser": "rounded"}, module="a.b")
    kept = rule("kept", {"implementation": "keep"}, module="a.b")
    assert found(perhaps, rule("shift", shift), rule("exact", exact)) == []
    assert found(kept, rule("shift", shift), rule("exact", exact)) == []
    assert found(rule("shift", shift, module="a"), rule("exact", exact, module="b")) == []


def test_what_is_extended_is_there_to_be_overridden(rules):
    base = "rules: [{id: base, match: {op: attention, module: a}, apply: {delta: output}}]"
    own = "extends: base.yaml\nrules: [{id: own, match: {op: attention}, apply: {delta: residual}}]"
    assert lint(rules(own, {"base.yaml": base})) == ()


def test_many_rules_are_compared_within_seconds():
    assert found(*(rule(f"r{index}", where=f"seq_q % 128 == {index % 128}") for index in range(300)))
    assert too_many(*(rule(f"r{n}", where=f"heads == {n} or seq_q > seq_k") for n in range(100))) == []


def thresholds(count, fact="seq_k", **match):
    return [rule(f"r{n}", where=f"{fact} >= {512 * n}", **match) for n in range(count, 0, -1)]


def too_many(*rules):
    return [f"PP207 {text.split()[2]}" for text in found(*rules) if text.startswith("PP207")]


def test_more_thresholds_than_torch_compiles():
    assert found(*thresholds(7)) == []  # eight graphs
    assert found(*thresholds(8)) == [
        'PP207 rule "r1" has the last of 8 conditions that split attention inputs by size into more than 8 graphs; '
        "torch compiles 8 (recompile_limit), then no more"
    ]
    assert too_many(*thresholds(20)) == ['PP207 "r13"']  # once, where it is too many
    two_facts = [rule(f"q{n}", where=f"seq_q >= {n}") for n in (900, 600)]
    assert too_many(*thresholds(3), *two_facts) == ['PP207 "q600"']  # 4 * 3 answers
    assert too_many(*thresholds(8, "heads")) == []  # one answer for a model, whatever its inputs
    assert too_many(*(rule(f"d{n}", where=f"not (dtype == bf16 and seq_q > {n})") for n in range(9, 90, 10))) != []
    assert too_many(*(rule(f"m{n}", where=f"seq_q > {n}", module=f"layers.{n}") for n in range(9, 90, 10))) == []


def test_the_limit_is_torchs():
    import torch

    assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT


TRITON = {"implementation": "triton"}


@pytest.mark.parametrize(("where", "device", "message"), [
    ("device == cpu", "", "and its condition holds on no GPU, which the kernels need"),
    ("device in (mps, xpu) and seq_q > 3", "cuda", "and its condition holds on no GPU, which the kernels need"),
    ("seq_q > 3", "cpu", 'whose kernels need a GPU, on "cpu"'),
    (None, "mps", 'whose kernels need a GPU, on "mps"'),
])  # fmt: skip
def test_kernels_without_a_gpu(where, device, message):
    for name in ("triton", "hopper"):
        (problem,) = lint(load([rule("r", {"implementation": name}, where=where)]), None, device)
        assert (problem.code, problem.message.partition(f"{name}, ")[2]) == ("PP206", message)


@pytest.mark.parametrize(("where", "device"), [
    ("device == cuda", "cpu"), ("device == cuda", "cuda"), (None, ""), (None, "cuda"), ("device != cpu", "cpu"),
])  # fmt: skip
def test_kernels_that_may_have_a_gpu(where, device):
    assert lint(load([rule("r", TRITON, where=where)]), None, device) == ()
    assert lint(load([rule("r", AUTO, where="device == cpu")]), None, device) == ()


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("my_net.py").write_text(
        "class Net:\n    def named_modules(self):\n        return [('', self), ('attn', self)]\n"
        "def make():\n    print('noise')\n    return Net()\n"
    )
    Path("rules.yaml").write_text(
        "version: 1\nrules:\n- id: a\n  match: {op: attention, module: atn}\n  apply: {delta: output}\n"
        "- id: b\n  match: {op: attention, where: seq_q < 0}\n  apply: {delta: output}\n"
    )
    assert cli.main(["lint", "rules.yaml", "--model", "my_net.py:make"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'rules.yaml:4:34 PP203 rule "a" module "atn" matches no module of the model; the nearest is "attn"',
        'rules.yaml:7:33 PP201 rule "b" matches no site: its condition never holds',
        "rules.yaml: 2 findings",
    ]
    assert cli.main(["lint", "rules.yaml"]) == 1
    assert cli.main(["lint", "stable-bf16"]) == 0
    assert capsys.readouterr().out.endswith("stable-bf16: nothing found\n")
    assert cli.main(["lint", "no.yaml"]) == cli.main(["lint", "off", "--model", "my_net.py:mak"]) == 2
    assert 'did you mean "make"?' in capsys.readouterr().err
