"""LayerNorm in two passes of FP32: the mean first, then the mean square of what is left (NUMERICS 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from precisionpass.reference.rows import last, statistics_dtype, sum_rows, working_copy


def forward(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, mean, rstd)``: y = (x - mean) * rstd * weight + bias over the last ``dims`` dimensions.

    y is contiguous, in ``dtype`` (default: x's), rounded once. mean and rstd are FP32 (FP64 for FP64) and have size 1
    in the normalised dimensions.
    """
    over = last(dims)
    y = working_copy(x, statistics_dtype(x.dtype, dtype))
    mean = y.mean(over, keepdim=True)
    y.sub_(mean)
    rstd = y.square().mean(over, keepdim=True).add_(eps).rsqrt_()
    y.mul_(rstd)
    if weight is not None:
        y.mul_(weight.to(y.dtype))
    if bias is not None:
        y.add_(bias.to(y.dtype))
    return y.to(dtype or x.dtype), mean, rstd


def backward(
    gradient: Tensor,
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
    further: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)`` in the inputs' formats; [0] where ``needs`` says no. Sums over rows are FP32.

    further: another gradient of x, added to dx before it is rounded.
    dx = rstd * (gw - mean(gw) - xhat * mean(gw * xhat)), with gw = g * weight and xhat = (x - mean) * rstd.
    """
    over = last(dims)
    normalised = working_copy(x, mean.dtype).sub_(mean).mul_(rstd)
    slope = working_copy(gradient, mean.dtype)
    dweight = sum_rows(slope * normalised, weight) if needs[1] else x.new_empty(0)
    dbias = sum_rows(slope, bias) if needs[2] else x.new_empty(0)
    if not needs[0]:
        return x.new_empty(0), dweight, dbias
    if weight is not None:
        slope.mul_(weight.to(slope.dtype))
    along = (slope * normalised).mean(over, keepdim=True)
    level = slope.mean(over, keepdim=True)
    dx = slope.sub_(level).sub_(normalised.mul_(along)).mul_(rstd)
    if further is not None:
        dx.add_(further)
    return dx.to(x.dtype), dweight, dbias
