"""Clipping around an attention's backward, the same for every implementation: dO before it, dq, dk and dv after it."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_gradient(gradient: Tensor, kind: str, bound: float, on_nonfinite: str) -> Tensor:
    """``gradient`` clipped, in its own format and layout.

    kind "value": each element to [-bound, bound]. "norm": the whole tensor scaled so that its Euclidean norm, summed in
    FP32 over the finite elements, is at most ``bound``. Non-finite elements: "zero" makes them 0 before anything else
    (also with kind "none"); "keep" leaves them as they are and clips the others as if they were not there; "raise" is
    "keep" here, since what raises is the monitor.
    """
    if (kind == "none" and on_nonfinite != "zero") or not gradient.numel():
        return gradient
    finite = torch.isfinite(gradient)
    clean = torch.where(finite, gradient, 0.0)
    if kind == "value":
        clean = clean.clamp(-bound, bound)
    if kind == "norm":
        norm = torch.linalg.vector_norm(clean, dtype=torch.promote_types(clean.dtype, torch.float32))
        clean = (clean.to(norm.dtype) * (bound / norm.clamp(min=bound))).to(clean.dtype)
    return clean if on_nonfinite == "zero" else torch.where(finite, clean, gradient)


def stop_at_bound(gradient: Tensor, output: Tensor, bound: float) -> Tensor:
    """dO, zero where the output stands at its clip, since there the output does not move; itself without a clip (0)."""
    if bound == 0:
        return gradient
    rounded = torch.tensor(bound, dtype=output.dtype).item()
    return gradient.masked_fill(output.abs() >= rounded, 0.0)
