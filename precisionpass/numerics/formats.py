"""Floating point formats: the spacing of numbers, and the one-byte residual of a rounded output (NUMERICS 3)."""

from __future__ import annotations

import torch
from torch import Tensor

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
"""Formats that P, dS and O are rounded to."""

RESIDUAL_STEPS = 254
"""Steps of the residual in one ulp. 254, not 256: the half ulp of a tie is 127, which an int8 holds."""

STEP_IN_BITS = 66052
"""256ths of the neighbours in FP32 that one step of a BF16 residual passes, 2^16 / 254: decoding is integer."""

DITHER = (49471, 37345)
"""Steps of the dither from row to row and from column to column, modulo 2^16: 2^16 / g and 2^16 / g^2 with g^3 = g + 1,
the sequence of the plane that is the most even known (M. Roberts, 2018)."""


def eps(dtype: torch.dtype) -> float:
    """Half the spacing of numbers at 1: the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def _fp16_ulp(value: Tensor) -> Tensor:
    """The spacing of FP16 numbers at ``value`` (FP16, any shape), as FP32; 2^-24 at subnormals and zero, 0 where
    nothing can be added: at infinities and NaN."""
    bits = value.view(torch.int16)
    spacing = (bits & 0x7C00).view(torch.float16).to(torch.float32).clamp_(min=2.0**-14).mul_(2.0**-10)
    return spacing.masked_fill_(~torch.isfinite(value), 0.0)


def _dither(exact: Tensor) -> Tensor:
    """Numbers in [0, 1) that fill it evenly along rows and along columns, shape [..., columns] of ``exact``."""
    row = torch.arange(exact[..., 0].numel(), device=exact.device).view(exact.shape[:-1])[..., None]
    column = torch.arange(exact.shape[-1], device=exact.device)
    row_step, column_step = DITHER
    return ((row * row_step + column * column_step) & 0xFFFF).to(torch.float32) * 2.0**-16


def encode_residual(exact: Tensor, rounded: Tensor) -> Tensor:
    """What rounding FP32 ``exact`` to ``rounded`` lost, in 254ths of an ulp, int8, any shape.

    FP16: ``(exact - rounded) / ulp(rounded) * 254``. BF16: the same of the distance between the bit patterns of
    ``exact`` and ``rounded`` as FP32, which counts away from zero; where a rounding reaches the next power of two the
    step stays that of ``exact``. Dithered: a number in [0, 1) that depends on the row and the column is added
    before rounding down, so that rows which are all alike, as on a saturated sink, lose different parts, and the mean
    of what they decode to is the exact value; rounded to nearest, all would be wrong by the same amount.
    Zeros, infinities and NaN have a residual of 0 or one that decoding ignores. Raises
    TypeError where ``rounded`` is neither.
    """
    if rounded.dtype == torch.bfloat16:
        distance = exact.view(torch.int32) - rounded.to(torch.float32).view(torch.int32)
        steps = (distance * (RESIDUAL_STEPS / 2.0**16)).add_(_dither(exact)).floor_()
    elif rounded.dtype == torch.float16:
        steps = (exact - rounded).div_(_fp16_ulp(rounded)).mul_(RESIDUAL_STEPS)
        steps = steps.add_(_dither(exact)).floor_().nan_to_num_(0.0)
    else:
        raise TypeError(f"{rounded.dtype} has no residual; it is kept for bfloat16 and float16 outputs")
    return steps.clamp_(-127, 127).to(torch.int8)


def decode_residual(rounded: Tensor, residual: Tensor) -> Tensor:
    """FP32: the output before its rounding, to 1/254 of an ulp and exact in the mean, from it and its residual."""
    if rounded.dtype == torch.bfloat16:
        bits = rounded.to(torch.float32).view(torch.int32)
        return (bits + ((residual.to(torch.int32) * STEP_IN_BITS + 128) >> 8)).view(torch.float32)
    return (_fp16_ulp(rounded) * residual).mul_(1.0 / RESIDUAL_STEPS).add_(rounded)
