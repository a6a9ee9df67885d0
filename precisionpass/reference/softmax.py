"""Softmax and log-softmax with FP32 statistics and one rounding (FP64 stays FP64).

Written out, as `torch.softmax` adds up a row of a million one by one on a CPU: off by 1e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precisionpass.reference.rows import statistics_dtype, working_copy


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``exp(x - max) / sum``, contiguous, in ``dtype`` (default: x's). A row of -inf, or with +inf or NaN: NaN."""
    result = working_copy(x, statistics_dtype(x.dtype, dtype))
    if result.numel():
        result.sub_(result.amax(dim, keepdim=True)).exp_()
        result.div_(result.sum(dim, keepdim=True))
    return result.to(dtype or x.dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``x - max - log(sum exp(x - max))``, contiguous, in ``dtype`` (default: x's)."""
    result = working_copy(x, statistics_dtype(x.dtype, dtype))
    if result.numel():
        result.sub_(result.amax(dim, keepdim=True))
        result.sub_(result.exp().sum(dim, keepdim=True).log_())
    return result.to(dtype or x.dtype)


def softmax_backward(gradient: Tensor, x: Tensor, output: Tensor | None, dim: int) -> Tensor:
    """``y * (g - sum g*y)`` in x's format; y is ``output`` if that was not rounded, else computed again from x.

    A rounded y does not sum to 1, and that error would reach every element of a row with one sign.
    """
    statistics = statistics_dtype(x.dtype, gradient.dtype)
    y = softmax(x, dim, statistics) if output is None else working_copy(output, statistics)
    slope = working_copy(gradient, statistics)
    mean = (slope * y).sum(dim, keepdim=True)
    return slope.sub_(mean).mul_(y).to(x.dtype)


def log_softmax_backward(gradient: Tensor, x: Tensor, output: Tensor | None, dim: int) -> Tensor:
    """``g - exp(y) * sum g`` in x's format; y is ``output`` if that was not rounded, else computed again from x."""
    statistics = statistics_dtype(x.dtype, gradient.dtype)
    y = log_softmax(x, dim, statistics) if output is None else working_copy(output, statistics)
    slope = working_copy(gradient, statistics)
    return slope.sub_(y.exp_().mul_(slope.sum(dim, keepdim=True))).to(x.dtype)
