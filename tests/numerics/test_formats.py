"""The one-byte residual, over every 16-bit number."""

import pytest
import torch

from precisionpass.numerics.formats import decode_residual, encode_residual, eps

SIXTEEN = [torch.bfloat16, torch.float16]


def every_number(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


def ulp(numbers):
    """From the format's definition, in float64: the last place of each number, 2^-133 and 2^-24 at the smallest."""
    digits, smallest = (7, -133) if numbers.dtype == torch.bfloat16 else (10, -24)
    exponent = torch.frexp(numbers.double().abs()).exponent - 1 - digits
    return torch.ldexp(torch.ones((), dtype=torch.float64), exponent.clamp(min=smallest).float())


@pytest.mark.parametrize("share", [-0.5, -0.3, -1e-3, 0.0, 0.1, 0.25, 0.499, 0.5])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_the_residual_restores_the_unrounded_value_to_a_254th_of_an_ulp(dtype, share):
    around = every_number(dtype)
    exact = (around.double() + share * ulp(around)).float()
    rounded = exact.to(dtype)
    residual = encode_residual(exact, rounded)
    assert residual.dtype == torch.int8
    restored = decode_residual(rounded, residual).double()
    allowed = (1 / 254 + 1e-5) * ulp(rounded) + 1e-7 * exact.double().abs()
    kept = rounded.isfinite()
    assert bool(((restored - exact.double()).abs() <= allowed)[kept].all())
    assert bool(restored[kept].isfinite().all())


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_ties_of_both_directions_and_no_rounding_at_all_are_representable(dtype):
    spacing = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    exact = torch.tensor([1 + 0.5 * spacing, 1 + 1.5 * spacing, 1 + spacing, 1.0])
    rounded = exact.to(dtype)
    assert rounded.tolist() == [1.0, 1 + 2 * spacing, 1 + spacing, 1.0]
    assert encode_residual(exact, rounded).tolist() == [127, -127, 0, 0]


@pytest.mark.parametrize("share", [-0.4987, -0.2513, 0.1003, 0.3333])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_the_mean_over_rows_that_are_all_alike_is_the_exact_value(dtype, share):
    """The error of one row is uniform over a step, 1 / 254 ulp wide: 5 standard errors of the mean of 4096."""
    around = torch.tensor([1.0, -1.5, 0.8, 3.1, -200.0], dtype=dtype)
    exact = (around.double() + share * ulp(around)).float().expand(4096, 5).contiguous()
    rounded = exact.to(dtype)
    restored = decode_residual(rounded, encode_residual(exact, rounded)).double()
    wrong = (restored - exact.double()) / ulp(around)
    assert float(wrong.mean(0).abs().max()) <= 5 * 0.5 / 254 / 4096**0.5 + 2e-5  # and FP32's own roundings
    assert float(wrong.abs().max()) > 0.5 / 254  # and not by rounding to nearest


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_zero_infinity_and_nan_stay_what_they_are(dtype):
    exact = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    rounded = exact.to(dtype)
    restored = decode_residual(rounded, encode_residual(exact, rounded))
    torch.testing.assert_close(restored, exact, rtol=0, atol=0, equal_nan=True)


def test_other_formats_are_refused_and_eps_is_half_a_spacing():
    with pytest.raises(TypeError, match="float32 has no residual"):
        encode_residual(torch.ones(1), torch.ones(1))
    assert eps(torch.bfloat16) == 2.0**-8 and eps(torch.float16) == 2.0**-11
