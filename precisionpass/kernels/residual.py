"""The int8 residual: what rounding the output to 16 bits lost, in 254ths of a unit in the last place (NUMERICS 3)."""

import triton
import triton.language as tl

STEPS = tl.constexpr(254.0)  # not 256: the half unit of a tie must be representable
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum
EXPONENT = tl.constexpr(0x7F800000)
BF16_INVERSE = tl.constexpr(-2105540608)  # (254 + 7) << 23 in 32 bits: less a value's exponent, that of 1 / ulp


@triton.jit
def unit_exponent(rounded):
    """The exponent, in FP32's bits, of the distance between neighbours of a BF16 or FP16 value."""
    exponent = (rounded.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    if rounded.dtype == tl.float16:
        exponent = tl.maximum(exponent, 127 - 14) - 10
    else:
        exponent = tl.maximum(exponent - 7, 1)
    return exponent


@triton.jit
def encode(precise, rounded):
    """int8(round((precise - rounded) / ulp(rounded) * 254)), in few instructions: each output pays for them.

    No test for odd values: with these bits a BF16 that is zero or below 1e-38 gives 0, and what infinities and NaN
    give is lost in `decode`, where they stay what they are.
    """
    wide = rounded.to(tl.float32)
    if rounded.dtype == tl.bfloat16:
        per_unit = (BF16_INVERSE - (wide.to(tl.int32, bitcast=True) & EXPONENT)).to(tl.float32, bitcast=True)
    else:
        per_unit = ((254 - unit_exponent(rounded)) << 23).to(tl.float32, bitcast=True)
    steps = (precise - wide) * per_unit * STEPS + ROUNDING  # per_unit is a power of two: exact
    return steps.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def decode(rounded, steps):
    """The FP32 value that `encode` saw, to a 508th of a unit in the last place."""
    unit = (unit_exponent(rounded) << 23).to(tl.float32, bitcast=True)
    return rounded.to(tl.float32) + steps.to(tl.float32) * unit * (1.0 / STEPS)
