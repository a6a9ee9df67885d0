"""FP8 products on a GPU that has them: every case against the reference, which emulates them bit for bit."""

from dataclasses import replace

import pytest
import torch

import precisionpass
from precisionpass import Match, Rule
from precisionpass.kernels import attention
from precisionpass.kernels.fp8_operands import quantise_operands
from precisionpass.kernels.launch import Plan
from precisionpass.numerics.fp8 import GRANULARITIES, has_fp8, quantise
from precisionpass.ops.arguments import AttentionArguments
from tests.kernels.check_fp8 import EVERY_PRODUCT, SHORT, differences, fp8_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_fp8("cuda"), reason="needs a GPU with FP8")]

CASES = dict(fp8_cases(torch.bfloat16, "cuda")) if has_fp8("cuda") else {}
WIDTHS = [(matmul, 128) for matmul in EVERY_PRODUCT] + [(EVERY_PRODUCT[-1], width) for width in (64, 256)]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16).transpose(1, 2)


@pytest.mark.parametrize("name", SHORT)
def test_it_agrees_with_the_reference(name):
    """Where exp2 of the GPU and exp of torch fall to either side of an edge, one P differs by a step of FP8."""
    found = differences(CASES[name])
    assert found[0] < 5e-3 and max(found[1:]) < 1e-3


@pytest.mark.parametrize(("matmul", "width"), WIDTHS)
def test_each_product_agrees_at_each_width(matmul, width):
    q, k, v = (normal(2, 700, 4, width, seed=seed) for seed in range(3))
    for causal in ("none", "top_left"):
        arguments = AttentionArguments(q, k, v, scale=width**-0.5, causal=causal, matmul=matmul, return_max_logits=True)
        found = differences(arguments)
        assert found[0] < 5e-3 and max(found[1:]) < 1e-3


@pytest.mark.parametrize("scale", GRANULARITIES)
def test_the_codes_are_those_of_the_reference_bit_for_bit(scale):
    q, k, v = (normal(2, 300, 4, 64, seed=seed) for seed in range(3))
    q[0, 1], k[1, 2, 5, 7], v[0, 0, 3, 4] = 0.0, 3e38, torch.nan
    plan = Plan(AttentionArguments(q, k, v, matmul=f"qk=fp8_e4m3 pv=fp8_e5m2 scale={scale}"))
    quantise_operands(plan, attention.launch)
    for source, codes in ((q, plan.operands[0]), (k, plan.operands[1])):
        expected = quantise(source, torch.float8_e4m3fn, scale).codes.view(torch.uint8)
        assert torch.equal(codes[:, :, :300].contiguous().view(torch.uint8), expected)
        assert not codes[:, :, 300:].contiguous().view(torch.uint8).any()
    expected = quantise(v, torch.float8_e5m2, scale, by_column=True).codes.float()
    turned = (
        plan.operands[2].float().unflatten(3, (-1, 4, 2, 2)).transpose(4, 5).flatten(3)
    )  # back in the order of keys
    same = turned[..., :300].transpose(2, 3)
    assert torch.equal(same.nan_to_num(7.0), expected.nan_to_num(7.0)) and bool(same[0, 0, 3, 4].isnan())


def test_the_same_bits_run_after_run_and_in_a_cuda_graph():
    q, k, v = (normal(2, 1000, 4, 128, seed=seed) for seed in range(3))
    arguments = AttentionArguments(q, k, v, scale=0.1, matmul=EVERY_PRODUCT[-1])
    first = attention.forward(arguments)[0]
    assert torch.equal(first, attention.forward(arguments)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention.forward(arguments)[0]
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, captured)


def test_by_rule_the_kernels_compute_it_and_the_gradients_are_of_16_bits():
    q, k, v = (normal(2, 256, 4, 64, seed=seed).requires_grad_() for seed in range(3))

    def attend(q, k, v):
        return (q @ k.mT / 8).softmax(-1) @ v

    apply = {"implementation": "triton", "matmul": {"qk": "fp8_e4m3", "pv": "fp8_e4m3"}}
    call = precisionpass.compile(attend, rules=[Rule(id="fp8", match=Match(op="attention"), apply=apply)])
    output = call(q, k, v)
    (site,) = precisionpass.report(call).sites
    assert site.decision == "rewritten" and "matmul" in site.settings
    arguments = AttentionArguments(q, k, v, scale=0.125, matmul=EVERY_PRODUCT[-1])
    assert torch.equal(output, attention.forward(arguments)[0])
    plain = torch.ops.precisionpass.attention(q, k, v, scale=0.125, save_residual=True)[0]
    assert not torch.equal(output, plain)
    upstream = torch.randn_like(output)
    found, expected = (torch.autograd.grad(made, (q, k, v), upstream) for made in (output, plain))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(plain, attention.forward(replace(arguments, matmul="", save_residual=True))[0])
