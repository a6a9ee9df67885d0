"""The totals of a site as one tensor: [len(ROWS), heads] FP64, sums first, then the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from precisionpass.hooks.figures import MAXIMA, ROWS, SUMS


def empty(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Totals of nothing: zeros, and -inf where the largest counts. Also in inference mode good for training."""
    with torch.inference_mode(False):
        totals = torch.zeros(len(ROWS), heads, dtype=torch.float64, device=device)
    totals[len(SUMS) :] = -torch.inf
    return totals


def copy_of(totals: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """A copy to go on from."""
    return empty(totals.shape[1], device).copy_(totals)


def merge(totals: Tensor, more: Tensor) -> None:
    """Add `more` to `totals`, in place: sums to sums, the larger of two maxima."""
    totals[: len(SUMS)] += more[: len(SUMS)]
    largest = totals[-len(MAXIMA) :]
    torch.maximum(largest, more[-len(MAXIMA) :], out=largest)
