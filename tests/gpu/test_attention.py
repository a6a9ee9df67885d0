"""The attention kernels on a GPU against float64: `python -m pytest -n 12 tests/gpu` (-n: compiling takes the time)."""

import pytest
import torch

from precisionpass.kernels import attention
from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved
from tests.kernels.agreement import disagreements, error
from tests.kernels.cases import CASES
from tests.kernels.check_interpreted import FP32
from tests.kernels.oracle import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MATRIX = [(name, dtype) for name in CASES for dtype in DTYPES if dtype == "bfloat16" or name in FP32]


def run(arguments: AttentionArguments, upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, residual, lse, dq, dk, dv, dbias)."""
    output, residual, lse, _, _ = attention.forward(arguments)
    needs = (True, True, True, arguments.bias is not None, False)
    gradients = attention.backward(Gradients(upstream, None, None, needs), arguments, Saved(output, residual, lse))
    return (output, residual, lse, *gradients[:4])


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """[B, H, S, W] over memory [B, S, H, W], fresh normal numbers."""
    batch, heads, length, width = shape
    return (scale * torch.randn(batch, length, heads, width, device="cuda")).to(dtype).transpose(1, 2)


@pytest.mark.parametrize(("name", "dtype"), MATRIX)
def test_forward_and_backward_agree_with_float64(name, dtype):
    errors = disagreements(CASES[name], DTYPES[dtype], "cuda")
    assert all(value < 3 for value in errors.values()), errors


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_a_long_sequence_agrees_with_float64(width, causal):
    q, k, v, upstream = (normal((1, 2, 1500, width)) for _ in range(4))
    arguments = AttentionArguments(q, k, v, scale=width**-0.5, causal=causal, save_residual=True)
    truth = oracle(arguments, None, upstream)
    found = run(arguments, upstream)
    assert error(found[0], truth.output) < 3e-3
    for gradient, exact in zip(found[3:6], truth.gradients[:3], strict=True):
        assert error(gradient, exact) < 4e-3


def test_every_bit_repeats():
    q, k, v, upstream = (normal((2, 4, 777, 128)) for _ in range(4))
    bias = torch.randn(1, 4, 777, 777, device="cuda")
    arguments = AttentionArguments(q, k, v, bias=bias, scale=0.1, causal="top_left", save_residual=True)
    first = run(arguments, upstream)
    for _ in range(20):
        assert all(torch.equal(once, again) for once, again in zip(first, run(arguments, upstream), strict=True))


def test_strides_of_every_kind_are_as_good_as_a_copy():
    q, k, v, upstream = (normal((2, 4, 200, 64)) for _ in range(4))
    expected = run(AttentionArguments(q, k, v, scale=0.125, save_residual=True), upstream)
    wide = torch.empty(2, 4, 200, 64, 3, device="cuda", dtype=torch.bfloat16)
    every_third = wide[..., 1].copy_(k)
    columns_first = v.transpose(2, 3).contiguous().transpose(2, 3)
    offset = torch.empty(2 * 4 * 200 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 4, 200, 64).copy_(q)
    found = run(AttentionArguments(offset, every_third, columns_first, scale=0.125, save_residual=True), upstream)
    assert error(found[0], expected[0]) < 3e-3 and error(found[2], expected[2]) < 1e-3
    for one, other in zip(expected[3:6], found[3:6], strict=True):
        assert error(one, other) < 4e-3


def test_a_gradient_expanded_from_one_number_needs_no_help():
    q, k, v = (normal((1, 2, 130, 64)) for _ in range(3))
    upstream = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(1, 2, 130, 64)
    arguments = AttentionArguments(q, k, v, scale=0.125, save_residual=True)
    found, expected = run(arguments, upstream), run(arguments, upstream.contiguous())
    assert all(torch.equal(one, other) for one, other in zip(found[:6], expected[:6], strict=True))


def test_offsets_past_two_to_the_31_elements():
    heads, length = 2, 3_000_000
    memory = torch.zeros(length, 1024, device="cuda", dtype=torch.bfloat16)
    memory[:, :128].normal_()
    q = memory[:, :128].view(1, length, heads, 64).transpose(1, 2)
    arguments = AttentionArguments(q, q, q, scale=0.125, causal="top_left", window_left=63, save_residual=True)
    output, residual, lse, _, _ = attention.forward(arguments)
    tail = q[:, :, -192:].contiguous()
    expected = oracle(AttentionArguments(tail, tail, tail, scale=0.125, causal="top_left", window_left=63), None, tail)
    assert error(output[:, :, -64:], expected.output[:, :, -64:]) < 3e-3
    needs = (True, True, True, False, False)
    dq, *_ = attention.backward(Gradients(q, None, None, needs), arguments, Saved(output, residual, lse))
    assert error(dq[:, :, -64:], expected.gradients[0][:, :, -64:]) < 4e-3


@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (2, 2, 0, 8), (2, 2, 8, 0)])
def test_nothing_in_nothing_out(shape):
    batch, heads, rows, keys = shape
    q, k = (torch.randn(batch, heads, length, 64, device="cuda", dtype=torch.bfloat16) for length in (rows, keys))
    arguments = AttentionArguments(q, k, k, save_residual=True, return_max_logits=True)
    output, residual, lse, max_logits, _ = attention.forward(arguments)
    assert output.shape == q.shape and not output.any()
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))
    assert max_logits.shape == (batch, heads) and torch.equal(max_logits, torch.full_like(max_logits, float("-inf")))
    needs = (True, True, True, False, False)
    found = attention.backward(Gradients(q, None, None, needs), arguments, Saved(output, residual, lse))
    assert [part.shape for part in found[:3]] == [q.shape, k.shape, k.shape] and not any(p.any() for p in found[:3])


def test_a_cuda_graph_replays_forward_and_backward():
    q, k, v, upstream = (normal((2, 4, 300, 64)) for _ in range(4))
    arguments = AttentionArguments(q, k, v, scale=0.125, causal="top_left", save_residual=True)
    run(arguments, upstream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(arguments, upstream)
    for part in (q, k, v, upstream):
        part.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = run(arguments, upstream)
    assert all(torch.equal(one, other) for one, other in zip(captured[:6], expected[:6], strict=True))


def test_nothing_waits_for_the_device():
    q, k, v, upstream = (normal((2, 4, 300, 64)) for _ in range(4))
    bias = torch.randn(1, 4, 300, 300, device="cuda")
    seed = torch.tensor([7], device="cuda")
    arguments = AttentionArguments(q, k, v, bias=bias, seed=seed, dropout_p=0.1, scale=0.125, save_residual=True)
    run(arguments, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(arguments, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_length_does_not_compile_again():
    from precisionpass.kernels.attention_forward import attention_forward

    lengths = (1024, 2048, 4096, 1024)
    counts = []
    for length in lengths:
        q, k, v = (normal((1, 1, length, 64)) for _ in range(3))
        attention.forward(AttentionArguments(q, k, v, scale=0.125, save_residual=True))
        counts.append(sum(len(caches[0]) for caches in attention_forward.device_caches.values()))
    assert counts[1:] == [counts[0]] * 3


def test_peak_memory_holds_no_square_tensor():
    shape = (1, 8, 8192, 64)
    q, k, v, upstream = (normal(shape) for _ in range(4))
    arguments = AttentionArguments(q, k, v, scale=0.125, causal="top_left", save_residual=True)
    run(arguments, upstream)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(arguments, upstream)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    elements, rows = q.numel(), q.shape[1] * q.shape[2]
    assert extra <= elements * (2 + 1 + 3 * 2) + 3 * 4 * rows + (1 << 20), extra
    del found
