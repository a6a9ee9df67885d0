"""The legality of sites that a user's recogniser finds, and who comes first where two want one node."""

import pytest
import torch
from torch.ops import aten

import precisionpass
from precisionpass import Found, Match, Recogniser, Rule, default_sites
from tests.agreement import against_eager, counts, reasons

KIND = "own.squared_relu"
RULES = [
    Rule(id="mine", match=Match(op=KIND), apply={"implementation": "own.act"}),
    Rule(id="rest", match=Match(op="softmax"), apply={"implementation": "auto", "lowering": "kernel"}),
]


def find(search):
    """From any relu to the square that ends it, whatever is in between."""
    for node in search.nodes:
        if node.target in (aten.pow.Tensor_Scalar, aten.square.default):
            relu = node
            while relu.op == "call_function" and relu.target not in (aten.relu.default, aten.relu_.default):
                relu = relu.args[0]
            if relu.op == "call_function":
                yield Found((relu.args[0],), node)


def act(x):
    return x.relu().square()


PARTS = {"rules": RULES, "sites": [*default_sites, Recogniser(KIND, find)], "actions": {"own.act": act}}


def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def in_place(x):
    y = x * 1
    y.relu_()
    return y**2


def written_between(x):
    y = x * 1
    z = y.relu()
    y.add_(1)
    return z**2 + y


def used_inside(x):
    y = x.relu()
    return y**2 + y


def returned_inside(x):
    y = x.relu()
    return y**2, y


def grad_mode(x):
    with torch.no_grad():
        y = x.relu()
    return y**2 + x


@pytest.mark.parametrize(("call", "reason"), [
    (in_place, "mutated_between"), (written_between, "mutated_between"), (used_inside, "used_elsewhere"),
    (returned_inside, "used_elsewhere"), (grad_mode, "grad_mode_changes"),
])  # fmt: skip
def test_what_must_not_be_replaced(call, reason):
    report = against_eager(call, (x(),), rewritten={}, **PARTS)
    assert [(miss.kind, miss.reason) for miss in report.near_misses] == [(KIND, reason)]


@pytest.mark.parametrize("call", [
    lambda x: x.relu() ** 2,
    lambda x: x.relu().contiguous().square(),
    lambda x: x.mT.relu().square().mT.reshape(-1),
    lambda x: x.relu() ** 2 + x.relu().square(),
    lambda x: (x.relu() ** 2).add_(1),
])  # fmt: skip
def test_what_may(call):
    report = against_eager(call, (x(),), **PARTS)
    assert not reasons(report) and counts(report)[KIND] in (1, 2)


def test_graphs_without_anything_of_the_packages_own_are_looked_into():
    assert counts(precisionpass.explain(lambda x: x.relu().square(), (x(),), **PARTS)) == {KIND: 1}
    assert precisionpass.explain(lambda x: x.relu().square(), (x(),)).sites == ()


def softmaxes(search):
    for node in search.nodes:
        if node.target is aten.softmax.int:
            yield Found((node.args[0], node.args[1]), node)


@pytest.mark.parametrize("first", [True, False])
def test_the_earlier_recogniser_has_the_first_choice(first):
    mine = Recogniser("own.row", softmaxes)
    rules = [Rule(id="mine", match=Match(op="own.row"), apply={"implementation": "own.act"}), RULES[1]]
    report = against_eager(
        lambda x: x.softmax(-1), (x(),), rules=rules, actions={"own.act": torch.softmax},
        sites=[mine, *default_sites] if first else [*default_sites, mine],
    )  # fmt: skip
    assert counts(report) == ({"own.row": 1} if first else {"softmax": 1})
    assert [(miss.kind, miss.reason) for miss in report.near_misses] == (
        [] if first else [("own.row", "part_of_other_site")]
    )


def test_without_the_default_recognisers_only_ones_own_are_found():
    parts = PARTS | {"sites": [Recogniser(KIND, find)]}
    report = precisionpass.explain(lambda x: (x.relu() ** 2).softmax(-1), (x(),), **parts)
    assert [site.kind for site in report.sites] == [KIND]


def test_a_kind_without_a_rule_changes_nothing():
    report = against_eager(lambda x: x.relu() ** 2, (x(),), **PARTS | {"rules": RULES[1:]}, rewritten={}, tolerance=0.0)
    assert [(site.decision, site.reason) for site in report.sites] == [("kept", "no_rule")]
