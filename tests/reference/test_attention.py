"""Attention against FP64 autograd, feature by feature: outputs, lse, probabilities and every gradient."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.reference import blocks
from precisionpass.reference.attention import bounded_shift
from precisionpass.reference.dropout import keep_mask
from tests.reference.eager import TOLERANCE, band, compare, draw, eager

attention = torch.ops.precisionpass.attention
DTYPES = list(TOLERANCE)
FP64 = torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (20, 37), (37, 20)])
def test_causal_alignments_with_shared_key_heads_and_another_value_width(dtype, causal, queries, keys):
    compare(
        lambda q, k, v: attention(q, k, v, scale=0.25, causal=causal, save_residual=True),
        lambda q, k, v: eager(q, k, v, scale=0.25, allowed=band(queries, keys, causal, -1, -1)),
        draw(dtype, (2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 24)),
    )


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("left", "right"), [(3, -1), (-1, 2), (4, 1), (0, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(13, 18), (18, 13)])
def test_windows(causal, left, right, queries, keys):
    compare(
        lambda q, k, v: attention(q, k, v, causal=causal, window_left=left, window_right=right),
        lambda q, k, v: eager(q, k, v, allowed=band(queries, keys, causal, left, right)),
        draw(FP64, (1, 2, queries, 8), (1, 2, keys, 8), (1, 2, keys, 8)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 19), (2, 1, 17, 19), (1, 4, 17, 1), (2, 4, 17, 19)])
def test_bias_mask_and_sinks(dtype, shape):
    mask = torch.rand(2, 1, 17, 19, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 0, 5] = False
    compare(
        lambda q, k, v, bias, sinks: attention(q, k, v, bias, mask, sinks, scale=0.25, save_residual=True),
        lambda q, k, v, bias, sinks: eager(q, k, v, bias, mask, sinks, scale=0.25),
        draw(dtype, (2, 4, 17, 16), (2, 2, 19, 16), (2, 2, 19, 16), shape, (1, 4, 1, 1)),
    )


@pytest.mark.parametrize("delta", ["residual", "recompute"])
def test_a_sink_of_minus_infinity_is_none_and_leaves_a_dead_row_dead(delta):
    sinks = torch.tensor([0.5, -torch.inf, 2.0, -torch.inf], dtype=FP64).view(1, 4, 1, 1)
    mask = torch.ones(1, 1, 9, 11, dtype=torch.bool)
    mask[0, 0, 4] = False
    compare(
        lambda q, k, v, sinks: attention(q, k, v, None, mask, sinks, delta=delta),
        lambda q, k, v, sinks: eager(q, k, v, None, mask, sinks),
        [*draw(FP64, (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8)), sinks],
    )


def test_bias_and_sinks_in_formats_of_their_own():
    q, k, v = draw(torch.bfloat16, (2, 4, 17, 16), (2, 2, 19, 16), (2, 2, 19, 16))
    bias, sinks = draw(torch.float32, (2, 4, 17, 19), (1, 4, 17, 1))
    bias[0, 0, 3, 4:] = -torch.inf
    compare(
        lambda q, k, v, bias, sinks: attention(q, k, v, bias, None, sinks, scale=0.25, save_residual=True),
        lambda q, k, v, bias, sinks: eager(q, k, v, bias, None, sinks, scale=0.25),
        [q, k, v, bias, sinks],
    )


@pytest.mark.parametrize("dtype", [FP64, torch.float32])
@pytest.mark.parametrize(
    ("settings", "truth"),
    [
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"logit_clip": "hard", "logit_clip_max": 0.8}, {"clip": lambda x: x.clamp(-0.8, 0.8)}),
        ({"logit_clip": "tanh", "logit_clip_max": 0.8}, {"clip": lambda x: 0.8 * torch.tanh(x / 0.8)}),
        (
            {"softcap": 2.0, "logit_clip": "hard", "logit_clip_max": 1.0},
            {"softcap": 2.0, "clip": lambda x: x.clamp(-1, 1)},
        ),
    ],
)
def test_caps_come_before_the_bias(dtype, settings, truth):
    compare(
        lambda q, k, v, bias: attention(q, k, v, bias, **settings),
        lambda q, k, v, bias: eager(q, k, v, bias, **truth),
        draw(dtype, (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (1, 4, 9, 11)),
    )


SCORES = {
    "s * t0 + t1": lambda s, t0, t1: s * t0 + t1,
    "where(i - j < 4, s, -inf) - t0 * (i - j) + t1": lambda s, t0, t1: (
        torch.where(torch.arange(9.0)[:, None] - torch.arange(11.0) < 4, s, -torch.inf)
        - t0 * (torch.arange(9.0)[:, None] - torch.arange(11.0))
        + t1
    ),
    "1.5 * tanh(s / 1.5) + max(t0, t1)": lambda s, t0, t1: 1.5 * torch.tanh(s / 1.5) + torch.maximum(t0, t1),
    "clamp(s, -1, t0 + 2) * exp(t1 / 4)": lambda s, t0, t1: torch.minimum(s.clamp(min=-1), t0 + 2) * torch.exp(t1 / 4),
    "t0 + t1": lambda s, t0, t1: (t0 + t1).expand(s.shape) + 0 * s,
    "s + h * 0.1 + b + t0 * 0 * t1": lambda s, t0, t1: (
        s
        + torch.arange(4, dtype=FP64)[:, None, None] * 0.1
        + torch.arange(2, dtype=FP64)[:, None, None, None]
        + t0 * 0 * t1
    ),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [FP64, torch.float32])
def test_score_expressions_and_their_inputs(dtype, score):
    compare(
        lambda q, k, v, t0, t1: attention(q, k, v, score_inputs=[t0, t1], score=score, scale=0.5, softcap=3.0),
        lambda q, k, v, t0, t1: eager(q, k, v, scale=0.5, score=lambda s: SCORES[score](s, t0, t1), softcap=3.0),
        draw(dtype, (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (1, 4, 1, 1), (2, 1, 1, 11)),
    )


def test_a_boolean_score_input():
    seen = torch.rand(2, 1, 1, 11, generator=torch.Generator().manual_seed(2)) > 0.3
    compare(
        lambda q, k, v: attention(q, k, v, score_inputs=[seen], score="where(t0, s, -inf)"),
        lambda q, k, v: eager(q, k, v, mask=seen),
        draw(FP64, (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8)),
    )


@pytest.mark.parametrize("dtype", [FP64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "place"), [("softmax", 2), ("dropped", 3)])
@pytest.mark.parametrize("delta", ["residual", "recompute"])
def test_gradients_through_output_lse_and_probabilities_under_dropout(dtype, kind, place, delta):
    seed, share = torch.tensor([1234]), round(0.3 * 2**16) / 2**16
    kept = keep_mask(seed, share, torch.arange(2 * 4 * 9).view(2, 4, 9), slice(0, 11), 11)
    settings = {
        "dropout_p": 0.3,
        "probabilities": kind,
        "delta": delta,
        "save_residual": True,
        "causal": "bottom_right",
    }
    seen = band(9, 11, "bottom_right", -1, -1)
    compare(
        lambda q, k, v, sinks: attention(q, k, v, None, None, sinks, None, seed, **settings),
        lambda q, k, v, sinks: eager(q, k, v, sinks=sinks, allowed=seen, kept=kept, keep_scale=1 / (1 - share)),
        draw(dtype, (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (1, 4, 1, 1)),
        probabilities=place,
    )


def test_dropout_of_everything_gives_zeros():
    q, k, v = (part.requires_grad_() for part in draw(torch.float32, *[(1, 2, 5, 8)] * 3))
    output = attention(q, k, v, seed=torch.tensor([0]), dropout_p=1.0)[0]
    gradients = torch.autograd.grad(output.sum(), (q, k, v))
    assert not output.any() and not any(part.any() for part in gradients)


@pytest.mark.parametrize("normaliser", ["rounded", "float32"])
@pytest.mark.parametrize("delta", ["residual", "recompute", "output"])
@pytest.mark.parametrize("shift", [[], [2.0, 8.0, 0.0], [8.0, 0.0, 0.5]])
def test_the_settings_of_the_arithmetic_agree_to_the_format(normaliser, delta, shift):
    if shift and normaliser == "float32":
        return
    settings = {"normaliser": normaliser, "delta": delta, "row_max_shift": shift, "save_residual": True}
    q, k, v = draw(torch.bfloat16, (2, 4, 33, 16), (2, 2, 33, 16), (2, 2, 33, 16))
    k[:, :, 1] = k[:, :, 0]
    compare(
        lambda q, k, v: attention(q, k, v, scale=0.25, **settings),
        lambda q, k, v: eager(q, k, v, scale=0.25),
        [q, k, v],
    )


def test_the_shift_moves_repeated_maxima_only_and_never_above_its_limit():
    rows = torch.tensor([[3.0, 3.0, 1.0], [3.0, 2.9, 1.0], [-3.0, -3.0, -9.0], [-30.0, -30.0, -31.0], [0.0, 0.0, -1.0]])
    shift = bounded_shift(rows, rows.amax(-1, keepdim=True), 2.0, 8.0, 0.0).flatten()
    assert shift.tolist() == [6.0, 3.0, 0.0, -22.0, 0.0]
    near = bounded_shift(rows, rows.amax(-1, keepdim=True), 10.0, 8.0, 0.2).flatten()
    assert near.tolist() == [11.0, 11.0, 0.0, -22.0, 0.0]


def test_max_logits_are_the_largest_scores_of_a_head_and_have_no_gradient():
    q, k, v, bias = draw(torch.float32, (2, 4, 300, 8), (2, 2, 300, 8), (2, 2, 300, 8), (1, 4, 300, 300))
    seen = band(300, 300, "top_left", -1, -1)
    largest = attention(q.requires_grad_(), k, v, bias, causal="top_left", return_max_logits=True)[3]
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) + bias).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(largest, scores.amax((2, 3)))
    assert largest.dtype == torch.float32 and not largest.requires_grad


def test_the_output_clip_bounds_the_output_and_stops_its_gradient():
    q, k, v = (part.requires_grad_() for part in draw(FP64, *[(1, 2, 7, 8)] * 3))
    output = attention(q, k, v, output_clip=0.3)[0]
    plain = eager(q, k, v)[0].clamp(-0.3, 0.3)
    torch.testing.assert_close(output, plain)
    upstream = torch.randn(output.shape, dtype=FP64)
    for got, want in zip(
        torch.autograd.grad(output, (q, k, v), upstream), torch.autograd.grad(plain, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_the_cut_into_blocks_changes_no_number_beyond_the_order_of_sums(monkeypatch):
    q, k, v = draw(torch.float32, (3, 4, 70, 8), (3, 2, 70, 8), (3, 2, 70, 8))
    results = []
    for size, rows in [(1 << 19, 256), (1 << 12, 16), (1, 1)]:
        monkeypatch.setattr(blocks, "SCORES_AT_A_TIME", size)
        monkeypatch.setattr(blocks, "ROWS_AT_A_TIME", rows)
        parts = [part.clone().requires_grad_() for part in (q, k, v)]
        output = attention(*parts, causal="bottom_right", window_left=40)[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), parts)])
    for cut in results[1:]:
        for whole, part in zip(results[0], cut, strict=True):
            torch.testing.assert_close(whole, part, rtol=1e-5, atol=4e-5)  # each is within 3.4e-5 of float64, 20 seeds


def test_a_saturated_row_in_fp32_has_gradients_as_near_to_float64_as_a_softmax_written_out():
    """dP and delta are all but equal there: a delta that is not of the same dP leaves 30 times the error."""

    def gradients(attend, *parts):
        parts = [part.clone().requires_grad_() for part in parts]
        return torch.autograd.grad(attend(*parts), parts[:2], torch.ones_like(parts[0]))

    worst = {"written out": 0.0, "op": 0.0}
    for seed in range(40):
        q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(3 * seed + n)) for n in (1, 3, 3))
        calls = {
            "written out": lambda q, k, v: (8 * q @ k.mT).softmax(-1) @ v,
            "op": lambda q, k, v: attention(q, k, v, scale=8.0)[0],
        }
        exact = gradients(calls["written out"], q.double(), k.double(), v.double())
        for name, call in calls.items():
            pairs = zip(gradients(call, q, k, v), exact, strict=True)
            worst[name] = max(worst[name], *(float((a - b).norm() / b.norm()) for a, b in pairs))
    assert worst["op"] <= 1.5 * worst["written out"]
