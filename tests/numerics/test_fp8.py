"""FP8 rounding against its definition and ml_dtypes, scales that are powers of two, and counted losses."""

import ml_dtypes
import numpy
import pytest
import torch

from precisionpass.numerics.fp8 import (
    BLOCK,
    DTYPES,
    GRANULARITIES,
    Products,
    cast,
    largest,
    losses,
    parse_products,
    quantise,
    rounded,
    scale_of,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ORACLE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMATS = list(DTYPES.values())


def every_number(dtype):
    """All 256 codes, and the finite numbers among them, ascending."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    numbers = codes.float()
    return codes, numbers[numbers.isfinite()].unique()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_is_kept(dtype):
    codes, numbers = every_number(dtype)
    assert torch.equal(rounded(numbers, dtype), numbers)
    assert float(numbers.max()) == largest(dtype)
    finite = codes.float().isfinite()
    assert torch.equal(cast(codes.float(), dtype).view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


@pytest.mark.parametrize("dtype", FORMATS)
def test_between_two_numbers_the_nearer_wins_and_the_even_one_at_the_middle(dtype):
    _, numbers = every_number(dtype)
    low, high = numbers[:-1], numbers[1:]
    middle = (low + high) / 2  # exact: FP32 has the bits
    assert torch.equal(rounded(torch.nextafter(middle, low), dtype), low)
    assert torch.equal(rounded(torch.nextafter(middle, high), dtype), high)
    ties = cast(middle, dtype).view(torch.uint8)
    assert bool((ties % 2 == 0).all())
    assert bool(((rounded(middle, dtype) == low) | (rounded(middle, dtype) == high)).all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_numbers_bit_for_bit_as_another_implementation_and_as_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator, dtype=torch.int64)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), 100 * torch.randn(200_000, generator=generator)])
    inside = x[x.abs() <= largest(dtype)]
    found = cast(inside, dtype)
    expected = torch.from_numpy(inside.numpy().astype(ORACLE[dtype]).view(numpy.uint8))
    assert torch.equal(found.view(torch.uint8), expected)
    assert torch.equal(found.view(torch.uint8), inside.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS)
def test_beyond_the_largest_number_it_saturates_and_what_is_not_finite_stays_visible(dtype):
    limit = largest(dtype)
    assert rounded(torch.tensor([limit * 1.01, -1e30]), dtype).tolist() == [limit, -limit]
    assert bool(rounded(torch.tensor([torch.inf, -torch.inf, torch.nan]), dtype).isnan().all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype):
    limit = largest(dtype)
    magnitude = torch.cat([torch.logspace(-25, 30, 997), limit * 2.0 ** torch.arange(-40.0, 40.0)])
    scale = scale_of(magnitude, dtype)
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    assert bool((magnitude / scale <= limit).all()) and bool((magnitude / scale > limit / 2).all())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 3e38, torch.inf, torch.nan])
def test_a_scale_is_finite_and_has_a_reciprocal_whatever_it_is_made_of(dtype, magnitude):
    scale = scale_of(torch.tensor(magnitude), dtype)
    assert 0 < float(scale) < torch.inf and 0 < float(1 / scale) < torch.inf


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_each_part_is_scaled_by_itself_alone(granularity, by_column):
    x = torch.randn(2, 3, BLOCK + 5, 8, generator=torch.Generator().manual_seed(0))
    small = {
        "tensor": [],
        "head": [x[1, 2]],
        "row": [x[..., 3] if by_column else x[:, :, 7]],
        "block": [x[:, :, :BLOCK]],
    }
    for part in small[granularity]:
        part *= 1e-20
    made = quantise(x, E4M3, granularity, by_column=by_column)
    assert made.codes.dtype == E4M3 and made.codes.shape == x.shape
    # Within half a step: 2^-4 of a normal number, else 2^-10 of the part's scale.
    assert bool(((made.values - x).abs() <= torch.maximum(x.abs() * 2.0**-4, made.scale * 2.0**-10)).all())
    assert losses(x, made).saturated == 0.0
    for part in small[granularity]:
        assert float(part.abs().max()) > 0 and float(made.values.abs().min()) < 1e-19
    if granularity != "tensor":
        coarser = quantise(x, E4M3, "tensor")
        assert losses(x, coarser).flushed > losses(x, made).flushed


def test_a_row_of_zeros_stays_zero_and_an_outlier_costs_its_own_part_alone():
    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 0
    x[0, 1, 2, 1] = 1e5
    for granularity in GRANULARITIES:
        made = quantise(x, E4M3, granularity)
        assert bool(made.values.isfinite().all()) and bool((made.values[0, 0] == 0).all())
    by_row, by_head = (quantise(x, E4M3, name) for name in ("row", "head"))
    assert losses(x, by_row).flushed < losses(x, by_head).flushed
    assert torch.equal(by_row.values[0, 1, 3], quantise(x[:, 1:, 3:4], E4M3, "tensor").values[0, 0, 0])


def test_losses_are_counted():
    x = torch.tensor([0.0, 1.0, 500.0, 1e-9, torch.inf]).view(1, 1, 5, 1)
    made = quantise(torch.ones(1, 1, 5, 1), E4M3, "tensor")
    held = type(made)(cast(x, E4M3), torch.ones(1, 1, 1, 1))
    assert losses(x, held) == (0.4, 0.2)
    assert losses(x[:, :, :0], type(made)(held.codes[:, :, :0], held.scale)) == (0.0, 0.0)


def test_products_are_read_from_one_line_of_text():
    assert parse_products("") == Products() and not parse_products("").any
    assert parse_products("qk=fp8_e4m3 pv=fp8_e5m2 scale=row") == Products(E4M3, E5M2, "row")
    assert parse_products("pv=fp8_e4m3") == Products(pv=E4M3) and parse_products("pv=fp8_e4m3").any


@pytest.mark.parametrize("text", ["fp8_e4m3", "qk=bf16", "scale=column", "qk=fp8_e4m3 qk=fp8_e4m3", "qk=head", "x=1"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="is not one of qk, pv and scale"):
        parse_products(text)
