"""What each implementation handles, as plain data: the checks, their messages and the fallbacks read it."""

from __future__ import annotations

import torch

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

CHOICES = {
    "causal": ("none", "top_left", "bottom_right"),
    "dead_rows": ("zero", "nan"),
    "normaliser": ("rounded", "float32"),
    "delta": ("residual", "recompute", "output"),
    "logit_clip": ("none", "hard", "tanh"),
    "grad_clip_kind": ("none", "value", "norm"),
    "on_nonfinite": ("keep", "zero", "raise"),
    "probabilities": ("none", "softmax", "dropped"),
    "implementation": ("auto", "reference", "triton", "hopper"),
}
"""The values of each argument that is a word."""

RESERVED = {
    "fp8_scales": "scales are computed in the call; leave it out",
}
"""Arguments that the schema holds for later, and what to do until then."""


def shift_limit(dtype: torch.dtype, fp8: bool) -> float:
    """The largest row_max_shift limit for a P of ``dtype``, or of FP8: exp(-limit) must stay well above the format's
    smallest number, 2^-24 in FP16 and 2^-17 in FP8 as P is scaled there."""
    if fp8:
        return 2.0
    return 8.0 if dtype == torch.float16 else 40.0


DEVICES = {"triton": ("cuda",)}
"""Device types (ROCm's is "cuda" as well) of the kernels; what they refuse on top, their ``supports`` says. The
reference runs everything everywhere."""
