"""What the norms and softmaxes share: a working copy in the format of the statistics, and sums for parameters."""

from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(*dtypes: torch.dtype | None) -> torch.dtype:
    """The format of the statistics: FP32, FP64 where an input or the output is FP64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def working_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of ``x`` in ``dtype``, free to be written over; never shares memory with ``x``."""
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def last(dims: int) -> tuple[int, ...]:
    """The last ``dims`` dimensions."""
    return tuple(range(-dims, 0))


def sum_rows(value: Tensor, like: Tensor) -> Tensor:
    """The sum over every leading dimension of ``value``, in ``like``'s shape and format; added up unrounded."""
    leading = tuple(range(value.dim() - like.dim()))
    total = value.sum(leading) if leading else value.clone()
    return total.to(like.dtype)
