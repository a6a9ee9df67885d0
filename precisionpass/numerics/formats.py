"""Floating point formats: the spacing of numbers, and the one-byte residual of a rounded output (NUMERICS 3)."""

from __future__ import annotations

import torch
from torch import Tensor

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
"""Formats that P, dS and O are rounded to."""

RESIDUAL_STEPS = 254
"""Steps of the residual in one ulp. 254, not 256: the half ulp of a tie is 127, which an int8 holds."""

SMALLEST_WITH_RESIDUAL = 1e-35
"""Below this magnitude a BF16 value gets no residual: ulp / 254 would leave FP32's normal range."""


def eps(dtype: torch.dtype) -> float:
    """Half the spacing of numbers at 1: the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def ulp(value: Tensor) -> Tensor:
    """The spacing of ``value``'s 16-bit format at each of its elements, as FP32.

    ``value``: BF16 or FP16, any shape. FP16 subnormals and zero have the spacing 2^-24. BF16 magnitudes below 1e-35
    give 0, and so do infinities and NaN: nothing is added there. Raises TypeError for another format.
    """
    bits = value.view(torch.int16)
    if value.dtype == torch.bfloat16:
        spacing = (bits & 0x7F80).view(torch.bfloat16).to(torch.float32).mul_(2.0**-7)
        spacing.masked_fill_(value.abs() < SMALLEST_WITH_RESIDUAL, 0.0)
    elif value.dtype == torch.float16:
        spacing = (bits & 0x7C00).view(torch.float16).to(torch.float32).clamp_(min=2.0**-14).mul_(2.0**-10)
    else:
        raise TypeError(f"ulp: {value.dtype} has no residual; it is kept for bfloat16 and float16 outputs")
    return spacing.masked_fill_(~torch.isfinite(value), 0.0)


def encode_residual(exact: Tensor, rounded: Tensor) -> Tensor:
    """``int8(round((exact - rounded) / ulp(rounded) * 254))``: FP32 ``exact`` and its 16-bit rounding, one byte each.

    Zero where the ulp counts as 0, so that decoding never makes a finite value infinite or an infinite one NaN.
    """
    spacing = ulp(rounded)
    steps = (exact - rounded).div_(spacing).mul_(RESIDUAL_STEPS).round_().clamp_(-127, 127)
    return steps.masked_fill_(spacing == 0, 0.0).to(torch.int8)


def decode_residual(rounded: Tensor, residual: Tensor) -> Tensor:
    """FP32 ``rounded + residual * ulp(rounded) / 254``: the output before its rounding, to 1/508 of an ulp."""
    return (ulp(rounded) * residual).mul_(1.0 / RESIDUAL_STEPS).add_(rounded)
