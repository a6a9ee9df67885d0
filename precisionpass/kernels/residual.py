"""The int8 residual: what rounding the output to 16 bits lost, in 254ths of a unit in the last place (NUMERICS 3)."""

import triton
import triton.language as tl

STEPS = tl.constexpr(254.0)  # not 256: the half unit of a tie must be representable
SMALLEST = tl.constexpr(1e-35)  # below it the exponent of a unit would leave FP32: no residual
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer


@triton.jit
def unit_in_last_place(rounded):
    """The distance between neighbours of a BF16 or FP16 value, in FP32."""
    exponent = (rounded.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    if rounded.dtype == tl.float16:
        exponent = tl.maximum(exponent, 127 - 14) - 10
    else:
        exponent = tl.maximum(exponent - 7, 1)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(precise, rounded):
    """int8(round((precise - rounded) / ulp(rounded) * 254)); 0 where a BF16 is tiny, or a value is not finite."""
    steps = (precise - rounded.to(tl.float32)) / unit_in_last_place(rounded) * STEPS
    usable = tl.abs(steps) <= 127.5
    if rounded.dtype == tl.bfloat16:
        usable = usable & (tl.abs(rounded.to(tl.float32)) >= SMALLEST)
    steps = tl.where(usable, steps, 0.0)
    return ((steps + ROUNDING) - ROUNDING).to(tl.int8)


@triton.jit
def decode(rounded, steps):
    """The FP32 value that `encode` saw, to a 508th of a unit in the last place."""
    return rounded.to(tl.float32) + steps.to(tl.float32) * unit_in_last_place(rounded) * (1.0 / STEPS)
