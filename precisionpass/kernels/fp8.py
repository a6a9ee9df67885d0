"""FP8 in the forward of attention: scales out of magnitudes, and the order of keys in which P stays where it is.

Tensor cores read both operands of an FP8 product along the axis that is summed, so V is stored as [B, H, Dv, keys].
The sum of Q K^T lies in a thread's registers by pairs of keys and the operand P by fours: within 16 keys, V's stand
in the order in which a thread holds them, and P changes its name instead of its place.
"""

import triton
import triton.language as tl

from precisionpass.kernels.scores import LN_2, LOG2_E
from precisionpass.kernels.tiles import load_tile

SMALLEST, LARGEST = tl.constexpr(27 << 23), tl.constexpr(247 << 23)  # bits of 2^-100 and 2^120
ROWS_SCALED = tl.constexpr(128)  # that share a scale "by block"; lengths are padded to a multiple of it
LARGEST_POWER, WHOLE = tl.constexpr(1e38), tl.constexpr(2.0**22)


@triton.jit
def grouped(tile):
    """[.., keys] with each 16 keys in the order of an FP8 operand: 8j + 2t + b goes to 4t + 2j + b."""
    ROWS: tl.constexpr = tile.shape[0]
    COUNT: tl.constexpr = tile.shape[1]
    return tile.reshape(ROWS, COUNT // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COUNT)


@triton.jit
def ones(ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """Ones by their bits: Triton 3.6 has no constants in FP8, and a cast would be done again in every block."""
    BITS: tl.constexpr = 0x38 if FORMAT == tl.float8e4nv else 0x3C
    return tl.full([ROWS, COLUMNS], BITS, tl.uint8).to(FORMAT, bitcast=True)


@triton.jit
def power_of(shift, numbers, VARIANT: tl.constexpr):
    """The power of two, rounded up, of exp(shift), in the units of `scores`; finite for a fill of finfo.min.

    P is then rounded alike whatever larger maximum comes later, since what it is multiplied by is a power of two too.
    """
    if VARIANT.fused_scale:
        exponent = shift * (numbers.scale * LOG2_E)
    else:
        exponent = shift * LOG2_E
    return tl.ceil(tl.maximum(exponent, -LARGEST_POWER))


@triton.jit
def exponential(values, shift, power, numbers, VARIANT: tl.constexpr):
    """2^pv_exponent exp(values) / 2^power; where FP32 has no fraction left beside the power, exp(values - shift)."""
    if VARIANT.fused_scale:
        exponent = values * (numbers.scale * LOG2_E) - (power - VARIANT.pv_exponent)
    else:
        near = values * LOG2_E - (power - VARIANT.pv_exponent)
        exponent = tl.where(tl.abs(power) < WHOLE, near, (values - shift) * LOG2_E + VARIANT.pv_exponent)
    return tl.exp2(exponent)


@triton.jit
def natural(shift, power, numbers, VARIANT: tl.constexpr):
    """What `exponential` subtracts, as a logarithm; -inf for a row without a key."""
    if VARIANT.fused_scale:
        shift = shift * numbers.scale
    return tl.where((tl.abs(power) < WHOLE) & (shift != float("-inf")), power * LN_2, shift)


@triton.jit
def load_turned(value, strides, batch, head, start, KEYS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """[KEYS, WIDTH] from key `start` of a V that is stored as [batch, head, width, keys], padded to whole tiles."""
    if DESCRIPTOR:
        tile = value.load([batch, head, 0, start]).reshape(WIDTH, KEYS)
    else:
        tile = load_tile(value + start, strides, batch, head, 0, WIDTH, WIDTH, KEYS, KEYS, False, False)
    return tl.trans(tile)


@triton.jit
def scale_of(bits, EXPONENT: tl.constexpr):
    """(s, 1 / s): the smallest power of two s with magnitude / s at most 1.75 * 2^EXPONENT, from its bits."""
    bits = tl.minimum(tl.maximum(bits, SMALLEST), LARGEST)
    exponent = (bits >> 23) - EXPONENT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scales(
    sizes, query_head, key_head, query_start, query_count, key_count, VARIANT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """(of the scores as a whole, of these rows of Q, where those of the keys and of V begin, of O as a whole).

    `sizes`: the numbers' magnitudes. What is not scaled is 1, and begins nowhere.
    """
    whole, query, key, value, of_output = 1.0, 1.0, 0, 0, 1.0
    if VARIANT.qk_exponent > 0:
        key = sizes.key
        if VARIANT.fp8_scale == "head":
            of_query, _ = scale_of(tl.load(sizes.query + query_head), VARIANT.qk_exponent)
            of_key, _ = scale_of(tl.load(sizes.key + key_head), VARIANT.qk_exponent)
            whole = of_query * of_key
        elif VARIANT.fp8_scale == "row":
            row = query_head.to(tl.int64) * (tl.cdiv(query_count, ROWS_SCALED) * ROWS_SCALED) + query_start
            query = tl.load(sizes.query + row + tl.arange(0, ROWS)).to(tl.float32, bitcast=True)[:, None]
            key += key_head.to(tl.int64) * (tl.cdiv(key_count, ROWS_SCALED) * ROWS_SCALED)
        else:
            block = query_head * tl.cdiv(query_count, ROWS_SCALED) + query_start // ROWS_SCALED
            query = tl.load(sizes.query + block).to(tl.float32, bitcast=True)
            key += key_head * tl.cdiv(key_count, ROWS_SCALED)
    if VARIANT.pv_exponent > 0:
        value = sizes.value
        if VARIANT.fp8_scale == "head":
            of_output, _ = scale_of(tl.load(value + key_head), VARIANT.pv_exponent)
        elif VARIANT.fp8_scale == "row":
            column = key_head * VARIANT.value_width + tl.arange(0, VARIANT.value_width)
            of_output, _ = scale_of(tl.load(value + column), VARIANT.pv_exponent)
            of_output = of_output[None, :]
        else:
            value += key_head * tl.cdiv(key_count, ROWS_SCALED)
    return whole, query, key, value, of_output


@triton.jit
def rescaled(product, key_start, numbers, VARIANT: tl.constexpr, KEYS: tl.constexpr):
    """Q K^T of these keys times the scales of its rows or blocks."""
    if VARIANT.fp8_scale == "row":
        of_key = tl.load(numbers.magnitudes.key + key_start + tl.arange(0, KEYS)).to(tl.float32, bitcast=True)
        product = product * numbers.magnitudes.query * of_key[None, :]
    else:
        of_key = tl.load(numbers.magnitudes.key + key_start // ROWS_SCALED).to(tl.float32, bitcast=True)
        product = product * (numbers.magnitudes.query * of_key)
    return product


@triton.jit
def block_of_values(key_start, numbers):
    """The scale of the block of V that these keys lie in."""
    return tl.load(numbers.magnitudes.value + key_start // ROWS_SCALED).to(tl.float32, bitcast=True)
