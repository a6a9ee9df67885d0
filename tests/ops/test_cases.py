"""Small inputs that broke other libraries, at the op. Their numbers are those of the table of such cases.

Case 1 is tests/numerics/test_acceptance.py; 8 is tests/reference/test_softmax.py; 10, 11 and 12 are
tests/reference/test_norms.py; 16 and 17 are test_layouts.py; 18 and 20 are test_compile.py; 19 is test_clipping.py.
"""

import math

import pytest
import torch

import precisionpass.ops  # noqa: F401
from tests.reference.eager import compare, draw, eager

attention = torch.ops.precisionpass.attention
SIXTEEN = [torch.bfloat16, torch.float16]


def gradients(output, tensors):
    return torch.autograd.grad(output.double().square().sum(), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("as_bias", [False, True])
def test_2_a_row_that_may_attend_to_nothing(dtype, as_bias):
    """Zeros and finite gradients with dead_rows="zero"; NaN where eager has it with "nan"."""
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    allowed[0, 0, 3] = False
    bias = torch.zeros(1, 1, 5, 5).masked_fill(~allowed, -torch.inf)
    where = (bias, None) if as_bias else (None, allowed)
    tensors = [part.requires_grad_() for part in draw(dtype, *[(1, 2, 5, 8)] * 3)]
    zero, _, lse, _, p = attention(*tensors, *where, save_residual=True, probabilities="softmax")
    assert not zero[:, :, 3].any() and bool((lse[:, :, 3] == -torch.inf).all()) and not p[:, :, 3].any()
    found = gradients(zero, tensors)
    assert all(bool(part.isfinite().all()) for part in found) and not found[0][:, :, 3].any()

    same, _, _, _, p = attention(*tensors, *where, dead_rows="nan", save_residual=True, probabilities="softmax")
    wide = [part.detach().double().requires_grad_() for part in tensors]
    scores = wide[0] @ wide[1].transpose(-1, -2)
    scores = scores + bias if as_bias else scores.masked_fill(~allowed, -torch.inf)
    truth = scores.softmax(-1) @ wide[2]
    assert torch.equal(same.isnan(), truth.isnan()) and bool(p[:, :, 3].isnan().all())
    for one, two in zip(gradients(same, tensors), gradients(truth, wide), strict=True):
        assert torch.equal(one.isnan(), two.isnan())


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_3_a_mask_row_of_finite_fills_is_an_average(causal, fill, dtype):
    """Forward and backward, though the lse of such a row is its maximum. At -1e4 a score keeps its first bits."""
    bias = torch.zeros(1, 1, 6, 6)
    bias[0, 0, 4] = fill
    allowed = None if causal == "none" else torch.ones(6, 6, dtype=torch.bool).tril()
    q, k, v = draw(dtype, *[(1, 2, 6, 8)] * 3)
    if fill < -1e4:
        output = attention(q, k, v, bias, causal=causal)[0]
        seen = 6 if causal == "none" else 5
        torch.testing.assert_close(output[:, :, 4].float(), v[:, :, :seen].float().mean(2), rtol=2.0**-8, atol=1e-3)
    else:
        q, k = (part.round() for part in (q, k))
    compare(
        lambda q, k, v: attention(q, k, v, bias, causal=causal, save_residual=True),
        lambda q, k, v: eager(q, k, v, bias.double(), allowed=allowed),
        [q, k, v],
    )


def test_4_two_finite_minima_that_add_up_to_minus_infinity():
    """Padding and causal mask of finfo.min in one BF16 sum: -inf beside finfo.min in the first rows."""
    lowest = torch.finfo(torch.bfloat16).min
    bias = torch.full((1, 1, 6, 6), lowest, dtype=torch.bfloat16).triu(1)
    bias[..., :3] += lowest
    assert bool((bias[0, 0, 0] == -torch.inf).any()) and bool((bias[0, 0, 0] == lowest).any())
    compare(
        lambda q, k, v: attention(q, k, v, bias, save_residual=True),
        lambda q, k, v: eager(q, k, v, bias.double()),
        draw(torch.bfloat16, *[(1, 2, 6, 8)] * 3),
    )


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_5_large_queries_and_keys_are_not_rounded_to_16_bits(dtype):
    """Norm 300 at width 128: scores of 8000, where BF16's spacing is 32 and FP16's 4."""
    q, k, v = draw(dtype, *[(1, 2, 32, 128)] * 3)
    q, k = ((300 * part.double() / part.double().norm(dim=-1, keepdim=True)).to(dtype) for part in (q, k))
    k[:, :, 1] = k[:, :, 0]
    q[:, :, ::2] = k[:, :, ::2]
    scale = 1 / math.sqrt(128)
    output, _, lse, _, _ = attention(q, k, v, scale=scale)
    truth, exact, _, _ = eager(*(part.double() for part in (q, k, v)), scale=scale)
    assert float(exact.max()) > 7000
    # An FP32 sum of 128 products around 8000 errs by sqrt(128) roundings of 2^-24 * 8000 or so, and so does P.
    assert float((lse - exact).abs().max()) < 2 * math.sqrt(128) * 2.0**-24 * 8000
    torch.testing.assert_close(output.double(), truth, rtol=0, atol=4 * 2.0**-8 if dtype == torch.bfloat16 else 1.2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_6_a_softcap_of_scores_beyond_its_reach(dtype):
    q = torch.tensor([[70.0], [-70.0], [0.01]]).view(1, 1, 3, 1).to(dtype)
    k = torch.tensor([[70.0], [-70.0]]).view(1, 1, 2, 1).to(dtype)
    tensors = [part.requires_grad_() for part in (q, k, torch.tensor([[1.0], [3.0]]).view(1, 1, 2, 1).to(dtype))]
    for settings in ({"softcap": 50.0}, {"score": "50 * (1 - 2 / (exp(2 * s / 50) + 1))"}):
        output, _, lse, largest, _ = attention(*tensors, return_max_logits=True, save_residual=True, **settings)
        torch.testing.assert_close(lse[0, 0, :2], torch.tensor([50.0, 50.0]), rtol=1e-6, atol=1e-5)
        assert abs(float(largest) - 50) < 1e-4
        found = gradients(output, tensors)
        assert all(bool(part.isfinite().all()) for part in ((output, *found) if "softcap" in settings else (output,)))


def test_7_the_scale_is_the_one_that_was_given():
    scale = 1 / (1 / math.sqrt(8))
    compare(
        lambda q, k, v: attention(q, k, v, scale=scale),
        lambda q, k, v: eager(q, k, v, scale=scale),
        draw(torch.float64, *[(1, 2, 5, 64)] * 3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_13_shared_key_heads_at_width_256_with_outlier_channels(dtype, causal):
    """The relative error of a whole gradient: three roundings (P or dS, dO, the result) of 2^-9 or 2^-12 at worst."""
    q, k, v = draw(dtype, (2, 16, 48, 256), (2, 2, 48, 256), (2, 2, 48, 256))
    for part in (q, k):
        part[..., 7] *= 8
        part[..., 100] += 5
    tensors = [part.requires_grad_() for part in (q, k, v)]
    wide = [part.detach().double().requires_grad_() for part in tensors]
    allowed = None if causal == "none" else torch.ones(48, 48, dtype=torch.bool).tril()
    output = attention(*tensors, scale=1 / 16, causal=causal, save_residual=True)[0]
    truth = eager(*wide, scale=1 / 16, allowed=allowed)[0]
    upstream = draw(dtype, truth.shape, seed=5)[0]
    # In FP32 a score is a sum of 256 products with outliers: 64 roundings of 2^-24 leave room for any order.
    limit = 3 * torch.finfo(dtype).eps / 2 if dtype in SIXTEEN else 64 * 2.0**-24
    got = (output, *torch.autograd.grad(output, tensors, upstream))
    known = (truth, *torch.autograd.grad(truth, wide, upstream.double()))
    for one, two in zip(got, known, strict=True):
        assert float((one.double() - two).detach().norm() / two.detach().norm()) < limit


@pytest.mark.parametrize("widths", [(128, 96), (8, 200), (1, 3), (3, 1)])
def test_14_another_width_of_the_value(widths):
    width, value_width = widths
    compare(
        lambda q, k, v: attention(q, k, v, scale=0.1, causal="top_left", save_residual=True),
        lambda q, k, v: eager(q, k, v, scale=0.1, allowed=torch.ones(9, 9, dtype=torch.bool).tril()),
        draw(torch.bfloat16, (2, 4, 9, width), (2, 2, 9, width), (2, 2, 9, value_width)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_autocast_region_around_the_call_changes_nothing(dtype):
    def run():
        q, k, v = draws = [part.requires_grad_() for part in draw(dtype, *[(1, 2, 5, 8)] * 3)]
        output, residual, lse, *_ = attention(q, k, v, save_residual=True)
        return output, residual, lse, *gradients(output, draws)

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(map(torch.equal, found, expected))
