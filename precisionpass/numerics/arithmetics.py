"""Arithmetics that fail, emulated in plain PyTorch: what the limits are there to catch. None is used to compute.

The kernel of the common kind is ``attention`` with ``normaliser="float32", delta="output"``; these two are not among
the op's settings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precisionpass.numerics.bias import Outcome
from precisionpass.numerics.generators import SCALE, Case

FAST_EXPONENTIAL = 0.99995
"""exp(0) of a fast exponential: not 1 before it is rounded to BF16, and 1 after."""


def fast_exponential(case: Case) -> Outcome:
    """FP32 accumulators, a normaliser of unrounded P, delta from the rounded output, and exp(0) = 0.99995."""
    scores, row_max = _scores(case)
    weights = (scores - row_max).exp() * FAST_EXPONENTIAL
    normaliser = weights.sum(-1, keepdim=True)
    output = ((weights.to(case.v.dtype).float() @ case.v.float()) / normaliser).to(case.v.dtype)
    lse = row_max + normaliser.log()
    return _backward(case, output, lse, (scores - lse).exp() * FAST_EXPONENTIAL)


def all_sixteen_bit(case: Case) -> Outcome:
    """Every intermediate in the input format: scores, P, the normaliser, the output, the lse, dP and delta."""
    dtype = case.q.dtype
    scores, row_max = (part.to(dtype) for part in _scores(case))
    weights = (scores - row_max).exp()
    normaliser = weights.sum(-1, keepdim=True)
    output = (weights @ case.v) / normaliser
    lse = row_max + normaliser.log()
    return _backward(case, output, lse, (scores - lse).exp())


def _scores(case: Case) -> tuple[Tensor, Tensor]:
    scores = SCALE * case.q.float() @ case.k.float().transpose(-1, -2)
    if case.causal == "top_left":
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores, scores.amax(-1, keepdim=True)


def _backward(case: Case, output: Tensor, lse: Tensor, weights: Tensor) -> Outcome:
    """The backward in the format of ``weights``, products accumulated in FP32."""
    dtype = weights.dtype
    upstream = case.upstream.float()
    delta = (upstream * output.float()).sum(-1, keepdim=True).to(dtype)
    slope = weights * ((upstream @ case.v.float().transpose(-1, -2)).to(dtype) - delta)
    low = slope.to(case.q.dtype).float()
    dq = (SCALE * low @ case.k.float()).to(case.q.dtype)
    dk = (SCALE * low.transpose(-1, -2) @ case.q.float()).to(case.q.dtype)
    dv = (weights.to(case.v.dtype).float().transpose(-1, -2) @ upstream).to(case.v.dtype)
    return Outcome(output, lse.squeeze(-1).float(), slope.float().sum(-1), dq, dk, dv)
