"""Every spelling of attention is one site, rewritten, with equal outputs and gradients and the formula it computes."""

import pytest
import torch

import precisionpass
from tests.agreement import against_eager
from tests.sites.spellings import ATTENTION, B, D, H, S


def tensors(layout: str = "bhsd", kv_heads: int = H, dtype=torch.float32):
    shapes = [(B, heads, S, D) if layout == "bhsd" else (B, S, heads, D) for heads in (H, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", ATTENTION)
def test_is_found_rewritten_and_equal(name):
    function, formula, options = ATTENTION[name]
    report = against_eager(function, tensors(**options), rewritten={"attention": 1}, tolerance=1e-5)
    [site] = [site for site in report.sites if site.kind == "attention"]
    assert site.formula == formula
    assert not report.near_misses


@pytest.mark.parametrize("name", ["scaled_query", "repeated_keys", "sliding_window", "divided_after_the_values"])
def test_in_inference_and_in_bf16(name):
    function, _, options = ATTENTION[name]
    q, k, v = tensors(**options, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = function(q.double(), k.double(), v.double())
        torch._dynamo.reset()
        compiled = precisionpass.compile(function, backend="aot_eager")
        ours, eager = compiled(q, k, v), function(q, k, v)
    assert precisionpass.report(compiled).sites[0].decision == "rewritten"
    assert (ours - exact).norm() <= (eager - exact).norm() * 1.02


@pytest.mark.parametrize("length", [5, 9])
def test_the_length_is_never_a_fact(length):
    """Under dynamic shapes one graph serves every length; S_q == S_k today must not be read into it."""

    def attend(q, k, v):
        return (q @ k.mT * 0.3).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -1e9).softmax(-1) @ v

    torch._dynamo.reset()
    compiled = precisionpass.compile(attend, backend="aot_eager", dynamic=True)
    for keys in (length, length + 3, length - 2):
        q, k, v = torch.randn(2, 3, length, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
        assert torch.allclose(compiled(q, k, v), attend(q, k, v), atol=1e-6)
