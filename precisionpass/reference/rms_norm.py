"""RMSNorm with FP32 statistics; where asked the row is divided by its largest magnitude first (NUMERICS 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from precisionpass.reference.rows import last, statistics_dtype, sum_rows, working_copy


def forward(
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    prescale: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, rstd)``: y = x * rstd * (weight + weight_offset) + bias, rstd = 1 / sqrt(mean(x^2) + eps).

    Over the last ``dims`` dimensions; without a weight the factor is 1, whatever the offset. y is contiguous, in
    ``dtype`` (default: x's), rounded once; rstd FP32 (FP64 for FP64), of size 1 in the normalised dimensions.
    ``prescale``: squares neither overflow nor vanish, whatever the magnitude of the row; without it FP32 gives 0 from
    |x| ~ 1e19 on.
    """
    over = last(dims)
    y = working_copy(x, statistics_dtype(x.dtype, dtype))
    if prescale and y.numel():
        size = y.abs().amax(over, keepdim=True).clamp_(min=eps**0.5)
        size.masked_fill_((size == 0) | ~torch.isfinite(size), 1.0)
        y.div_(size)
        rstd = y.square().mean(over, keepdim=True).add_(eps / size / size).rsqrt_()
        y.mul_(rstd)
        rstd = rstd / size
    else:
        rstd = y.square().mean(over, keepdim=True).add_(eps).rsqrt_()
        y.mul_(rstd)
    if weight is not None:
        y.mul_(weight.to(y.dtype) + weight_offset)
    if bias is not None:
        y.add_(bias.to(y.dtype))
    return y.to(dtype or x.dtype), rstd


def backward(
    gradient: Tensor,
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    needs: tuple[bool, bool, bool],
    further: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)`` in the inputs' formats; [0] where ``needs`` says no. Sums over rows are FP32.

    further: another gradient of x, added to dx before it is rounded.
    dx = rstd * (gw - xhat * mean(gw * xhat)), with gw = g * (weight + weight_offset) and xhat = x * rstd.
    """
    normalised = working_copy(x, rstd.dtype).mul_(rstd)
    slope = working_copy(gradient, rstd.dtype)
    dweight = sum_rows(slope * normalised, weight) if needs[1] else x.new_empty(0)
    dbias = sum_rows(slope, bias) if needs[2] else x.new_empty(0)
    if not needs[0]:
        return x.new_empty(0), dweight, dbias
    if weight is not None:
        slope.mul_(weight.to(slope.dtype) + weight_offset)
    along = (slope * normalised).mean(last(dims), keepdim=True)
    dx = slope.sub_(normalised.mul_(along)).mul_(rstd)
    if further is not None:
        dx.add_(further)
    return dx.to(x.dtype), dweight, dbias
