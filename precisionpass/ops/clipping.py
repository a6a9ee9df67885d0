"""Clipping of an attention's dq, dk and dv, the same after every implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_gradient(gradient: Tensor, kind: str, bound: float, on_nonfinite: str) -> Tensor:
    """``gradient`` clipped, in its own format and layout.

    kind "value": each element to [-bound, bound]. "norm": the whole tensor scaled so that its Euclidean norm, summed in
    FP32 over the finite elements, is at most ``bound``. Non-finite elements: "zero" makes them 0 before anything else
    (also with kind "none"); "keep" leaves them as they are and clips the others as if they were not there.
    """
    if (kind == "none" and on_nonfinite == "keep") or not gradient.numel():
        return gradient
    finite = torch.isfinite(gradient)
    clean = torch.where(finite, gradient, 0.0)
    if kind == "value":
        clean = clean.clamp(-bound, bound)
    if kind == "norm":
        norm = torch.linalg.vector_norm(clean, dtype=torch.promote_types(clean.dtype, torch.float32))
        clean = (clean.to(norm.dtype) * (bound / norm.clamp(min=bound))).to(clean.dtype)
    return clean if on_nonfinite == "zero" else torch.where(finite, clean, gradient)
