"""The Hopper kernels on a GPU against float64 and against the portable ones: what the portable ones promise holds."""

import random
from dataclasses import replace

import pytest
import torch

from precisionpass.kernels import attention, hopper
from precisionpass.kernels.launch import Plan
from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved
from tests.gpu.test_attention import normal, run
from tests.kernels.agreement import disagreements, error
from tests.kernels.cases import Case
from tests.kernels.oracle import oracle

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def case(width: int, rows: int, keys: int, **values: object) -> Case:
    """Shapes of `Case` by name, the rest settings of the op."""
    shapes = {name: values.pop(name) for name in list(values) if name in Case.__dataclass_fields__}
    return Case(width=width, rows=rows, keys=keys, **shapes, settings={"implementation": "hopper"} | values)


CASES = {
    "full": case(128, 256, 256),
    "full, 64 wide": case(64, 256, 256),
    "causal": case(128, 384, 384, causal="top_left"),
    "any lengths, 64 wide": case(64, 333, 501),
    "causal, any length": case(128, 333, 333, causal="top_left"),
    "bottom_right, more keys": case(64, 300, 1001, causal="bottom_right"),
    "bottom_right, more rows": case(128, 1000, 300, causal="bottom_right"),
    "bottom_right, more rows, nan": case(64, 400, 130, causal="bottom_right", dead_rows="nan"),
    "top_left, more rows": case(64, 1000, 300, causal="top_left"),
    "grouped": case(128, 300, 300, causal="top_left", batch=2, heads=6, key_heads=2),
    "multi-query": case(64, 300, 200, heads=5, key_heads=1),
    "window": case(64, 700, 700, causal="top_left", window_left=200),
    "window, two sides": case(128, 500, 500, window_left=70, window_right=130),
    "96 wide": case(96, 300, 300, causal="top_left"),
    "wide values": case(64, 300, 200, value_width=128, causal="top_left"),
    "nothing saved": case(128, 300, 300, save_residual=False),
    "recompute, gradient of the log-sum-exp": case(64, 300, 300, delta="recompute", lse_gradient=True),
    "large q and k": case(128, 300, 300, size=26.0),
    "one key": case(64, 300, 1),
}
SOME = ("causal", "any lengths, 64 wide", "grouped", "window, two sides")  # as well in FP16, and with dQ in one pass
MATRIX = [(name, torch.bfloat16, True) for name in CASES]
MATRIX += [(name, dtype, False) for name in SOME for dtype in (torch.bfloat16, torch.float16)]


def asked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: object) -> AttentionArguments:
    """An attention in training, by the Hopper kernels or by none."""
    return AttentionArguments(
        q, k, v, scale=q.shape[3] ** -0.5, save_residual=True, implementation="hopper", **settings
    )


@pytest.mark.parametrize(("name", "dtype", "deterministic"), MATRIX)
def test_they_agree_with_float64(name, dtype, deterministic):
    chosen = replace(CASES[name], settings=CASES[name].settings | {"deterministic": deterministic})
    arguments = chosen.build(dtype, "cuda")
    assert attention.chosen(arguments) == ("hopper", None)
    portable_backward = {"bottom_right, more rows, nan", "wide values"}
    assert (hopper.backward_refusal(Plan(arguments)) is not None) == (name in portable_backward)
    errors = disagreements(chosen, dtype, "cuda")
    assert all(value < 3 for value in errors.values()), errors


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("width", [64, 128])
def test_every_bit_repeats(width, causal):
    q, k, v, upstream = (normal((4, 16, 1000, width)) for _ in range(4))
    arguments = asked(q, k, v, causal=causal)
    first = run(arguments, upstream)
    for _ in range(50):
        assert all(torch.equal(once, again) for once, again in zip(first, run(arguments, upstream), strict=True))


@pytest.mark.parametrize("width", [64, 128])
def test_where_dq_need_not_repeat_the_rest_does_and_dq_nearly(width):
    q, k, v, upstream = (normal((2, 8, 1000, width)) for _ in range(4))
    arguments = asked(q, k, v, deterministic=False)
    first = run(arguments, upstream)
    for _ in range(20):
        found = run(arguments, upstream)
        assert all(torch.equal(once, again) for i, (once, again) in enumerate(zip(first, found, strict=True)) if i != 3)
        assert error(found[3], first[3]) < 1e-3


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("width", [64, 128])
def test_they_give_what_the_portable_kernels_give_within_rounding(width, causal):
    source = random.Random(width)
    for _ in range(12):
        rows, keys = 2 * source.randint(33, 400) + 1, 2 * source.randint(0, 400) + 1
        key_heads = 2 * source.randint(1, 2)
        q, upstream = (normal((2, 2 * key_heads, rows, width)) for _ in range(2))
        k, v = (normal((2, key_heads, keys, width)) for _ in range(2))
        arguments = asked(q, k, v, causal=causal)
        found, portable = run(arguments, upstream), run(replace(arguments, implementation="triton"), upstream)
        drawn = (rows, keys, key_heads)
        assert torch.equal(found[2].isinf(), portable[2].isinf()), drawn
        assert error(found[2].nan_to_num(0, 0, 0), portable[2].nan_to_num(0, 0, 0), 1.0) < 2e-3, drawn
        for index in (0, 3, 4, 5):
            assert error(found[index], portable[index], 1.0) < 5e-3, (index, drawn)


@pytest.mark.parametrize("width", [64, 128])
def test_either_forward_feeds_either_backward(width):
    q, k, v, upstream = (normal((1, 4, 500, width)) for _ in range(4))
    own = asked(q, k, v, causal="top_left")
    portable = replace(own, implementation="triton")
    truth = oracle(own, None, upstream)
    for first, second in ((own, portable), (portable, own)):
        output, residual, lse, _, _ = attention.forward(first)
        needs = (True, True, True, False, False)
        found = attention.backward(Gradients(upstream, None, None, needs), second, Saved(output, residual, lse))
        for gradient, exact in zip(found[:3], truth.gradients[:3], strict=True):
            assert error(gradient, exact) < 4e-3


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, True, True)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_that_nobody_needs_are_not_made(needs, deterministic):
    q, k, v, upstream = (normal((1, 2, 300, 64)) for _ in range(4))
    arguments = asked(q, k, v, deterministic=deterministic)
    output, residual, lse, _, _ = attention.forward(arguments)
    truth = oracle(arguments, None, upstream)
    gradients = Gradients(upstream, None, None, (*needs, False, False))
    found = attention.backward(gradients, arguments, Saved(output, residual, lse))
    for gradient, exact, needed in zip(found[:3], truth.gradients[:3], needs, strict=True):
        assert error(gradient, exact) < 4e-3 if needed else gradient.numel() == 0


def test_a_cuda_graph_replays_tiles_that_are_taken_by_a_counter():
    q, k, v, upstream = (normal((4, 16, 1000, 64)) for _ in range(4))
    arguments = asked(q, k, v, causal="top_left", deterministic=False)
    expected = run(arguments, upstream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(arguments, upstream)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(captured[i], expected[i]) for i in (0, 1, 2, 4, 5))
        assert error(captured[3], expected[3]) < 1e-3


def test_another_length_does_not_compile_again():
    from precisionpass.kernels.hopper.forward import attention_forward_hopper

    counts = []
    for length in (1024, 2048, 4096, 1024):
        q, k, v = (normal((1, 1, length, 64)) for _ in range(3))
        attention.forward(asked(q, k, v))
        counts.append(sum(len(caches[0]) for caches in attention_forward_hopper.device_caches.values()))
    assert counts[1:] == [counts[0]] * 3
