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
    "implementation": ("auto", "reference", "triton"),
}
"""The values of each argument that is a word."""

RESERVED = {
    "fp8_scales": "FP8 operands are not built yet; pass bfloat16 or float16",
    "matmul": 'products in another format than the input\'s are not built yet; leave matmul=""',
}
"""Arguments that the schema holds for later, and what to do until then."""

SHIFT_LIMIT = {torch.float16: 8.0}
"""The largest row_max_shift limit by format: exp(-limit) must stay well above the format's smallest number."""

SHIFT_LIMIT_DEFAULT = 40.0

DEVICES = {"triton": ("cuda",)}
"""Device types (ROCm's is "cuda" as well) of the kernels; what they refuse on top, their ``supports`` says. The
reference runs everything everywhere."""
