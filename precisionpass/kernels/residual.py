"""The int8 residual: what rounding the output to 16 bits lost (numerics/formats.py says what the byte means)."""

import triton
import triton.language as tl

STEPS = tl.constexpr(254)  # not 256: the half unit of a tie must be representable
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum


@triton.jit
def unit_exponent(rounded):
    """The exponent, in FP32's bits, of the distance between neighbours of an FP16 value."""
    exponent = (rounded.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    return tl.maximum(exponent, 127 - 14) - 10


@triton.jit
def encode(precise, rounded):
    """int8 steps from `rounded` to `precise`, in few instructions: each output pays for them.

    BF16 in integers: adding 0x7FFF and the last bit kept is how rounding to even carries, so the low half of that sum
    is what rounding dropped, 0x7FFF where nothing was. FP16: (precise - rounded) / ulp * 254; what infinities and NaN
    give is lost in `decode`, where they stay what they are.
    """
    if rounded.dtype == tl.bfloat16:
        bits = precise.to(tl.int32, bitcast=True)
        dropped = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF
        steps = ((dropped * STEPS + 0x8000) >> 16) - 127
    else:
        per_unit = ((254 - unit_exponent(rounded)) << 23).to(tl.float32, bitcast=True)
        scaled = (precise - rounded.to(tl.float32)) * per_unit * STEPS + ROUNDING  # per_unit is a power of two: exact
        steps = scaled.to(tl.int32, bitcast=True)
    return steps.to(tl.int8)


@triton.jit
def decode(rounded, steps):
    """The FP32 value that `encode` saw, to a 508th of a unit in the last place."""
    wide = rounded.to(tl.float32)
    if rounded.dtype == tl.bfloat16:
        precise = (wide.to(tl.int32, bitcast=True) + steps.to(tl.int32) * 258).to(tl.float32, bitcast=True)
    else:
        unit = (unit_exponent(rounded) << 23).to(tl.float32, bitcast=True)
        precise = wide + steps.to(tl.float32) * unit * (1.0 / STEPS)
    return precise
