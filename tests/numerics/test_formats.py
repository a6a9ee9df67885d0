"""ulp and the one-byte residual, over every 16-bit number."""

import pytest
import torch

from precisionpass.numerics.formats import decode_residual, encode_residual, eps, ulp

SIXTEEN = [torch.bfloat16, torch.float16]


def every_number(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_ulp_is_the_distance_to_the_next_number_away_from_zero(dtype):
    numbers = every_number(dtype)
    numbers = numbers[numbers.isfinite() & (numbers.abs().float() >= (1e-35 if dtype == torch.bfloat16 else 0.0))]
    bits = numbers.view(torch.int16).int() & 0x7FFF
    after = (bits + 1).to(torch.int16).view(dtype).double()
    finite = after.isfinite()
    torch.testing.assert_close(ulp(numbers)[finite].double(), (after - numbers.abs().double())[finite], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_the_residual_restores_the_unrounded_value_to_a_508th_of_an_ulp(dtype):
    numbers = every_number(dtype)
    numbers = numbers[numbers.isfinite()]
    for share in (-0.5, -0.3, 0.0, 0.1, 0.499, 0.5):
        exact = numbers.float() + share * ulp(numbers)
        residual = encode_residual(exact, numbers)
        assert residual.dtype == torch.int8
        restored = decode_residual(numbers, residual)
        step = ulp(numbers) / 254
        assert bool(((restored - exact).abs() <= 0.5001 * step + 1e-7 * exact.abs()).all())
        assert bool(restored.isfinite().all())


def test_a_tie_is_representable():
    one = torch.ones(2, dtype=torch.bfloat16)
    exact = one.float() + torch.tensor([0.5, -0.25]) * 2.0**-7
    assert encode_residual(exact, one).tolist() == [127, -64]


def test_tiny_and_infinite_values_have_no_residual():
    rounded = torch.tensor([1e-36, 0.0, torch.inf, -torch.inf, torch.nan], dtype=torch.bfloat16)
    exact = torch.tensor([1.001e-36, 1e-39, 3.4e38, -3.4e38, torch.nan])
    residual = encode_residual(exact, rounded)
    assert residual.tolist() == [0] * 5
    torch.testing.assert_close(decode_residual(rounded, residual), rounded.float(), equal_nan=True)


def test_other_formats_are_refused_and_eps_is_half_a_spacing():
    with pytest.raises(TypeError, match="float32 has no residual"):
        ulp(torch.ones(1, dtype=torch.float32).view(torch.float32))
    assert eps(torch.bfloat16) == 2.0**-8 and eps(torch.float16) == 2.0**-11
