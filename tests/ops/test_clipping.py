"""Clipping of dq, dk, dv, with and without elements that are not finite (CASES 19)."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.ops.clipping import clip_gradient

attention = torch.ops.precisionpass.attention
INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("kind", "on_nonfinite", "given", "wanted"),
    [
        ("none", "keep", [3.0, INF, NAN], [3.0, INF, NAN]),
        ("none", "zero", [3.0, INF, NAN], [3.0, 0.0, 0.0]),
        ("value", "keep", [3.0, -0.5, -INF, NAN], [1.0, -0.5, -INF, NAN]),
        ("value", "zero", [3.0, -0.5, -INF, NAN], [1.0, -0.5, 0.0, 0.0]),
        ("norm", "keep", [3.0, 4.0, INF], [0.6, 0.8, INF]),
        ("norm", "zero", [3.0, 4.0, INF], [0.6, 0.8, 0.0]),
        ("norm", "keep", [0.3, 0.4], [0.3, 0.4]),
        ("norm", "keep", [0.0, 0.0], [0.0, 0.0]),
        ("norm", "zero", [INF], [0.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_clipped(kind, on_nonfinite, given, wanted, dtype):
    result = clip_gradient(torch.tensor(given, dtype=dtype), kind, 1.0, on_nonfinite)
    torch.testing.assert_close(result, torch.tensor(wanted, dtype=dtype), equal_nan=True)


def test_a_norm_beyond_the_format_is_still_clipped():
    result = clip_gradient(torch.full((4096,), 60000.0).half(), "norm", 1.0, "keep")
    torch.testing.assert_close(result.float().norm(), torch.tensor(1.0), rtol=2e-3, atol=0)


def test_the_op_clips_each_of_its_three_gradients_in_place_of_its_layout():
    q, k, v = (torch.randn(2, 4, 6, 8).requires_grad_() for _ in range(3))
    plain = torch.autograd.grad(attention(q, k, v)[0].sum(), (q, k, v))
    clipped = torch.autograd.grad(attention(q, k, v, grad_clip=0.1, grad_clip_kind="norm")[0].sum(), (q, k, v))
    for one, two in zip(plain, clipped, strict=True):
        torch.testing.assert_close(two, one * min(1.0, float(0.1 / one.norm())))
        assert two.stride() == one.stride()


@pytest.mark.parametrize("kind", ["none", "value", "norm"])
def test_an_infinite_upstream_gradient_reaches_only_what_it_may_attend_to(kind):
    q, k, v = (torch.randn(1, 1, 6, 8).requires_grad_() for _ in range(3))
    upstream = torch.ones(1, 1, 6, 8)
    upstream[0, 0, 2, 3] = INF
    for on_nonfinite, finite in (("zero", True), ("keep", False)):
        output = attention(q, k, v, causal="top_left", grad_clip=1.0, grad_clip_kind=kind, on_nonfinite=on_nonfinite)[0]
        gradients = torch.autograd.grad(output, (q, k, v), upstream)
        assert all(bool(part.isfinite().all()) == finite for part in gradients)
        assert bool(gradients[1][0, 0, 3:].isfinite().all()), "keys that row 2 cannot see"
        assert bool(gradients[0][0, 0, :2].isfinite().all()), "rows of their own"


@pytest.mark.parametrize(
    "clip",
    [
        {"logit_clip": "hard", "logit_clip_max": 0.7},
        {"logit_clip": "tanh", "logit_clip_max": 0.7},
        {"output_clip": 0.3},
        {"logit_clip": "tanh", "logit_clip_max": 2.0, "output_clip": 0.4, "softcap": 1.5},
    ],
    ids=lambda clip: "-".join(map(str, clip.values())),
)
@pytest.mark.parametrize("delta", ["residual", "recompute"])
def test_the_gradient_is_that_of_the_clipped_function(clip, delta):
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def attend(*tensors):
        return attention(*tensors, causal="top_left", delta=delta, **clip)[0]

    free = attention(q, k, v, causal="top_left")[0]
    assert float((attend(q, k, v) - free).abs().max()) > 1e-2, "nothing is clipped"
    assert torch.autograd.gradcheck(attend, [part.requires_grad_() for part in (q, k, v)])
