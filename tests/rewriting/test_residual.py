"""A norm of a residual sum and the sum as one op, wherever that changes nothing but the passes over memory."""

import operator

import pytest
import torch
from torch.nn import functional

import precisionpass
from precisionpass import Rule
from tests.agreement import at_least_as_good, counts

APPLY = {"implementation": "auto", "lowering": "kernel"}
RULES = [Rule(id="all", match={"op": ["layer_norm", "rms_norm", "softmax"]}, apply=APPLY)]


def layer_norm(x, w, b):
    return functional.layer_norm(x, (16,), w, b)


def rms_norm(x, w, b):
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + w.float())).to(x.dtype)


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}


def inputs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    parts = torch.randn(4, 6, 16), 3 * torch.randn(4, 6, 16) + 1, torch.randn(16), torch.randn(16)
    return [part.to(dtype).requires_grad_() for part in parts]


def called(call, *args, sites=1):
    """The ops of precisionpass in the rewritten graph, and how many sums of activations are left."""
    seen = []

    def backend(module, example):
        seen.extend(module.graph.nodes)
        return module

    torch._dynamo.reset()
    compiled = precisionpass.compile(call, rules=RULES, backend=backend)
    compiled(*args)
    names = [str(node.target) for node in seen]
    assert sum(counts(precisionpass.report(compiled)).values()) == sites
    sums = [n for n in seen if n.target is operator.add and n.meta["example_value"].dim() == 3]
    return [name.split(".")[1] for name in names if name.startswith("precisionpass.")], len(sums)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_goes_on_and_both_are_as_good(kind, dtype):
    def block(x, residual, w, b):
        total = x + residual
        return total + NORMS[kind](total, w, b).tanh()

    given = inputs(dtype)
    assert called(block, *given) == (["add_norm"], 1)  # the one at the end
    at_least_as_good(block, *given, rules=RULES, backend="aot_eager")


@pytest.mark.parametrize("kind", NORMS)
def test_a_sum_that_only_the_norm_reads(kind):
    given = inputs()
    at_least_as_good(lambda x, r, w, b: NORMS[kind](x.add(r), w, b), *given, rules=RULES, backend="aot_eager")
    assert called(lambda x, r, w, b: NORMS[kind](torch.add(x, r), w, b), *given)[0] == ["add_norm"]


def test_a_cast_behind_the_norm_is_its_rounding():
    def call(x, r, w, b):
        return layer_norm(x + r, w, b).float()

    given = inputs()
    assert called(call, *given)[0] == ["add_norm"]
    at_least_as_good(call, *given, rules=RULES, backend="aot_eager")


def test_of_two_norms_of_one_sum_the_first_takes_it():
    def call(x, r, w, b):
        total = x + r
        return layer_norm(total, w, b) * layer_norm(total, b, w).sigmoid()

    given = inputs()
    assert called(call, *given, sites=2)[0] == ["add_norm", "layer_norm"]
    at_least_as_good(call, *given, rules=RULES, backend="aot_eager", rewritten=2)


def changed_later(x, r, w, b):
    total = x + r
    y = layer_norm(total, w, b)
    return y.detach(), total.mul_(2)


def without_gradients(x, r, w, b):
    with torch.no_grad():
        total = x + r
    return layer_norm(total, w, b)


def weight_made_later(x, r, w, b):
    total = x + r
    return layer_norm(total, total.mean((0, 1)), b)


def weight_changed_between(x, r, w, b):
    scale = w.clone()
    total = x + r
    scale.mul_(2)
    return layer_norm(total, scale, b)


@pytest.mark.parametrize("call", [
    lambda x, r, w, b: layer_norm(torch.add(x, r, alpha=2), w, b),
    lambda x, r, w, b: layer_norm(x + 1, w, b),
    lambda x, r, w, b: layer_norm(x + r[:1], w, b),
    lambda x, r, w, b: layer_norm(x + b, w, b),
    lambda x, r, w, b: layer_norm(x.float() + r, w.float(), b.float()),
    lambda x, r, w, b: layer_norm(x.clone().add_(r), w, b),
    lambda x, r, w, b: layer_norm(x.mT.contiguous().mT + r.mT.contiguous().mT, w, b),
    lambda x, r, w, b: (x + r).softmax(-1),
    changed_later, without_gradients, weight_made_later, weight_changed_between,
])  # fmt: skip
def test_any_other_sum_stays_where_it_is(call):
    given = [tensor.detach() for tensor in inputs()]
    assert len(called(call, *given)[0]) == 1 and "add_norm" not in called(call, *given)[0]
    torch._dynamo.reset()
    results = precisionpass.compile(call, rules=RULES, backend="aot_eager")(*given)
    torch.testing.assert_close(results, call(*given), rtol=2**-6, atol=2**-6)
