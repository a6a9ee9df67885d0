"""Which implementation computes an op: the Triton kernels on a GPU where they can, else the reference."""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from precisionpass.ops.capabilities import DEVICES


@lru_cache
def triton_kernels(stem: str) -> ModuleType | None:
    """``precisionpass.kernels.<stem>``, imported when a GPU tensor first needs it; None where Triton is missing."""
    name = f"precisionpass.kernels.{stem}"
    return importlib.import_module(name) if find_spec("triton") and find_spec(name) else None


def row_kernels(x: Tensor, *others: Tensor | None, dtype: torch.dtype | None = None) -> ModuleType | None:
    """The kernels of norms and softmaxes where they are to compute this call, None for the reference."""
    if x.device.type not in DEVICES["triton"]:
        return None
    kernels = triton_kernels("rows")
    if kernels is None or kernels.supports(x, *others) is not None or dtype not in (None, *kernels.FLOATING):
        return None
    return kernels
