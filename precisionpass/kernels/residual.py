"""The int8 residual: what rounding the output to 16 bits lost (numerics/formats.py says what the byte means)."""

import triton
import triton.language as tl

STEPS = tl.constexpr(254)  # not 256: the half unit of a tie must be representable
STEP_IN_BITS = tl.constexpr(66052)  # 256 * 2^16 / 254
ROW_STEP, COLUMN_STEP = tl.constexpr(49471), tl.constexpr(37345)  # of the dither, modulo 2^16: see formats.py
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum


@triton.jit
def unit_exponent(rounded):
    """The exponent, in FP32's bits, of the distance between neighbours of an FP16 value."""
    exponent = (rounded.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    return tl.maximum(exponent, 127 - 14) - 10


@triton.jit
def encode(precise, rounded, row, column):
    """int8 steps from `rounded` to `precise`, in few instructions: each output pays for them.

    BF16 in integers: adding 0x7FFF and the last bit kept is how rounding to even carries. FP16: (precise - rounded) /
    ulp * 254; what infinities and NaN give is lost in `decode`, where they stay what they are. What is below a step
    rounds up or down by the dither of formats.py: right in the mean of rows that are all alike.
    row: int64 number of the row in the tensor; column: int32; together of `precise`'s shape.
    """
    bits = precise.to(tl.int32, bitcast=True)
    dither = (row.to(tl.int32) * ROW_STEP + column * COLUMN_STEP) & 0xFFFF
    if rounded.dtype == tl.bfloat16:
        carry = 0x7FFF + ((bits >> 16) & 1)
        steps = ((((bits + carry) & 0xFFFF) - carry) * STEPS + dither) >> 16
    else:
        per_unit = ((254 - unit_exponent(rounded)) << 23).to(tl.float32, bitcast=True)
        scaled = (precise - rounded.to(tl.float32)) * per_unit * STEPS  # per_unit is a power of two: exact
        scaled = scaled + (dither.to(tl.float32) * (1.0 / 65536) - 0.5) + ROUNDING
        steps = scaled.to(tl.int32, bitcast=True)
    return steps.to(tl.int8)


@triton.jit
def decode(rounded, steps):
    """The FP32 value that `encode` saw, to a 254th of a unit in the last place."""
    wide = rounded.to(tl.float32)
    if rounded.dtype == tl.bfloat16:
        distance = (steps.to(tl.int32) * STEP_IN_BITS + 128) >> 8
        precise = (wide.to(tl.int32, bitcast=True) + distance).to(tl.float32, bitcast=True)
    else:
        unit = (unit_exponent(rounded) << 23).to(tl.float32, bitcast=True)
        precise = wide + steps.to(tl.float32) * unit * (1.0 / STEPS)
    return precise
