"""Packed sequences on a GPU: as each alone, whatever stands beside it, without a wait for the device."""

import pytest
import torch
import torch.nn.functional as F

import precisionpass.ops  # noqa: F401
from tests.kernels.agreement import error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = [700, 0, 1, 1024, 333]
SETTINGS = {"scale": 0.125, "causal": "top_left", "save_residual": True, "implementation": "triton"}


def bounds(lengths: list[int]) -> torch.Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to("cuda", torch.int32)


def normal(total: int) -> torch.Tensor:
    memory = torch.randn(total, 4, 64, device="cuda", dtype=torch.bfloat16)
    return memory.transpose(0, 1)[None].requires_grad_()


def run(q, k, v, upstream, cu, **settings) -> list[torch.Tensor]:
    """(output, dq, dk, dv)."""
    packing = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    output = torch.ops.precisionpass.attention(q, k, v, **(SETTINGS | packing | settings))[0]
    return [output, *torch.autograd.grad(output, (q, k, v), upstream)]


def test_each_sequence_is_as_if_alone():
    tensors = [normal(sum(LENGTHS)) for _ in range(3)]
    upstream = normal(sum(LENGTHS)).detach()
    found = run(*tensors, upstream, bounds(LENGTHS))
    for start, length in zip(bounds(LENGTHS).tolist(), LENGTHS, strict=False):
        rows = slice(start, start + length)
        if length:
            parts = [part[:, :, rows].detach().requires_grad_() for part in tensors]
            for packed, alone in zip(found, run(*parts, upstream[:, :, rows], None), strict=True):
                assert error(packed[:, :, rows], alone) < 4e-3


def test_infinities_of_a_neighbour_stay_there():
    tensors = [normal(500) for _ in range(3)]
    upstream, cu = normal(500).detach(), bounds([100, 300, 100])
    clean = run(*tensors, upstream, cu)
    for part in (*tensors, upstream):
        part.data[:, :, 100:400] = float("inf")
    poisoned = run(*tensors, upstream, cu)
    for one, two in zip(clean, poisoned, strict=True):
        for rows in (slice(0, 100), slice(400, 500)):
            assert torch.equal(one[:, :, rows], two[:, :, rows])


def test_nothing_waits_and_a_graph_replays_with_other_lengths():
    tensors = [normal(600) for _ in range(3)]
    upstream, cu = normal(600).detach(), bounds([200, 300, 100])
    run(*tensors, upstream, cu, delta="recompute")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*tensors, upstream, cu, delta="recompute")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    q, k, v = (part.detach() for part in tensors)
    attend = torch.ops.precisionpass.attention
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **SETTINGS)[0]
    cu.copy_(bounds([1, 0, 450]))
    graph.replay()
    assert torch.equal(captured, attend(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **SETTINGS)[0])
    assert not captured[:, :, 451:].any()


def test_numbers_that_do_not_ascend_touch_no_memory_outside():
    guarded = [torch.full((3, 600, 4, 64), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    tensors = [memory[1].transpose(0, 1)[None].requires_grad_() for memory in guarded]
    upstream = normal(600).detach()
    for wrong in ([0, 900, 200, -5], [50, -(2**31), 2**31 - 1, 3], [600, 0, 600, 0]):
        run(*tensors, upstream, torch.tensor(wrong, device="cuda", dtype=torch.int32))
    torch.cuda.synchronize()
    assert all(bool((memory == 7.0).all()) for memory in guarded)
