"""FP8: rounding with saturation, power-of-two scales by tensor, head, row or block, and what they lose (NUMERICS 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
"""By the name that rules give them: three bits after the point up to 448, and two up to 57344."""

GRANULARITIES = ("tensor", "head", "row", "block")
"""What has a scale of its own: the tensor, a head of a sequence, a row of the product, or BLOCK rows of a head."""

BLOCK = 128
LIMIT_FRACTION, LIMIT_EXPONENT = 0.875, {E4M3: 9, E5M2: 16}
"""The largest number of a format, as torch.frexp splits it: 448 = 0.875 * 2^9, 57344 = 0.875 * 2^16."""

SMALLEST, LARGEST = 2.0**-100, 2.0**120
"""Magnitudes that a scale is made of: a row of zeros has one too, and neither it nor its reciprocal overflows."""

PROBABILITY_SCALE = {E4M3: 2.0**8, E5M2: 2.0**15}
"""P lies in 0..1 and is multiplied by this before rounding, so that a diffuse row is not flushed to zero."""


OLDEST = (8, 9)
"""The first compute capability of NVIDIA's with FP8 products (Ada); Hopper is 9.0."""


def has_fp8(device: str) -> bool:
    """Whether the tensor cores of "cuda" multiply FP8 as it is meant here; True for "meta", which stands for one that
    does. AMD's are not asked for: the FP8 of CDNA 3 has other numbers."""
    if device != "cuda":
        return device == "meta"
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST


class Products(NamedTuple):
    """Which products of attention are FP8, as dtypes (None: the input's format), and what has its own scale."""

    qk: torch.dtype | None = None
    pv: torch.dtype | None = None
    scale: str = "head"

    @property
    def any(self) -> bool:
        """Whether one of them is."""
        return self.qk is not None or self.pv is not None


@lru_cache(maxsize=64)
def parse_products(text: str) -> Products:
    """The products of "qk=fp8_e4m3 pv=fp8_e4m3 scale=head", each part optional. Raises ValueError for anything else."""
    found: dict[str, torch.dtype | str] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        choices = GRANULARITIES if name == "scale" else tuple(DTYPES)
        if name not in Products._fields or name in found or value not in choices:
            raise ValueError(f"{part!r} is not one of qk, pv and scale with a value of its own")
        found[name] = DTYPES.get(value, value)
    return Products(**found)


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of an FP8 format."""
    return torch.finfo(dtype).max


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 ``x`` in ``dtype``, to nearest and even; beyond the largest number that number, NaN for inf and NaN."""
    limit = largest(dtype)
    return x.clamp(-limit, limit).masked_fill(~x.isfinite(), torch.nan).to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``cast`` as FP32 again."""
    return cast(x, dtype).to(torch.float32)


def scale_of(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two s, FP32, with magnitude / s in the format; for a magnitude of zero one that is finite.

    A power of two divides without rounding, so the same bits come out on every device, and ties stay ties.
    """
    fraction, exponent = torch.frexp(magnitude.to(torch.float32).nan_to_num(LARGEST).clamp(SMALLEST, LARGEST))
    exponent = exponent - LIMIT_EXPONENT[dtype] + (fraction > LIMIT_FRACTION).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(fraction), exponent)


@dataclass(frozen=True)
class Quantised:
    """A [B, H, S, W] tensor in FP8: ``codes`` times ``scale``, which broadcasts to them."""

    codes: Tensor
    scale: Tensor

    @property
    def values(self) -> Tensor:
        """What the codes stand for, FP32."""
        return self.codes.to(torch.float32) * self.scale


def quantise(x: Tensor, dtype: torch.dtype, granularity: str, *, by_column: bool = False) -> Quantised:
    """``x`` [B, H, S, W] of any float format in FP8, scaled by its largest magnitude (the recipe "current").

    granularity: of GRANULARITIES; "row" is one scale for each row, with ``by_column`` for each column: the axis that a
    product does not sum over, so that the scale can be taken out of it.
    """
    scale = scale_of(_magnitude(x, granularity, by_column), dtype)
    return Quantised(cast(x.to(torch.float32) / scale, dtype), scale)


def _magnitude(x: Tensor, granularity: str, by_column: bool) -> Tensor:
    size = x.abs().to(torch.float32)
    if x.numel() == 0:
        return size.new_zeros((1, 1, 1, 1))
    if granularity == "tensor":
        return size.amax((0, 1, 2, 3), keepdim=True)
    if granularity == "head":
        return size.amax((2, 3), keepdim=True)
    if granularity == "row":
        return size.amax(2 if by_column else 3, keepdim=True)
    rows = x.shape[2]
    blocks = functional.pad(size.amax(3), (0, -rows % BLOCK)).unflatten(2, (-1, BLOCK)).amax(3)
    return blocks.repeat_interleave(BLOCK, 2)[:, :, :rows].unsqueeze(3)


class Losses(NamedTuple):
    """Shares of the elements: beyond the largest number, and not zero before the cast but after it."""

    saturated: float
    flushed: float


def losses(x: Tensor, quantised: Quantised) -> Losses:
    """What casting ``x`` to ``quantised`` cut off at either end; what is inf or NaN counts as saturated."""
    if not x.numel():
        return Losses(0.0, 0.0)
    beyond = ~((x.to(torch.float32) / quantised.scale).abs() <= largest(quantised.codes.dtype))
    return Losses(float(beyond.double().mean()), float(flushed(x, quantised)))


def flushed(x: Tensor, quantised: Quantised) -> Tensor:
    """The share of elements that are not zero before the cast but after it, FP64 [], on the device of ``x``."""
    return ((x != 0) & (quantised.codes.to(torch.float32) == 0)).double().mean()
