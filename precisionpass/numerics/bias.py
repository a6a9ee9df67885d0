"""How wrong an attention is, and with which sign: rho, b, and the drift they cause in training (NUMERICS 4 and 5).

rowsum dS is zero in exact arithmetic. What an implementation leaves there is its error of delta, and it is read through
the op's own interface: the gradient of a zero bias of shape [B, H, Sq, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from precisionpass.numerics.generators import SCALE, WIDTH, Case, twin_sink


@dataclass(frozen=True)
class Outcome:
    """What an implementation gave on a case: output, lse [.., rows], rowsum dS [.., rows], dq, dk, dv."""

    output: Tensor
    lse: Tensor
    row_sum: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


Attend = Callable[[Case], Outcome]


@dataclass(frozen=True)
class Measured:
    """The figures of one case, each 0 for exact arithmetic.

    rho: rms of rowsum dS, relative to the rms of ``sum |dO| * P|V|``. bias: the magnitude of its mean, likewise.
    row_sum_p: largest ``|rowsum P - 1|`` under the returned lse. output: largest ``|O - O64| / P|V|`` in units of
    2^-8. lse: largest error of the lse over ``|m| + 10``. nonfinite: elements of output, lse (but for dead rows) or
    gradients that are not finite. wrong_zeros: rows of zeros that should not be. dead_gradient: largest |dq| of a row
    that may attend to nothing.
    """

    rho: float
    bias: float
    row_sum_p: float
    output: float
    lse: float
    nonfinite: int
    wrong_zeros: int
    dead_gradient: float


def through_op(attention: Callable[..., tuple[Tensor, ...]], **settings: object) -> Attend:
    """An Attend that calls ``attention`` (the op, or a compiled function around it) forward and backward."""

    def attend(case: Case) -> Outcome:
        q, k, v = (part.detach().requires_grad_() for part in (case.q, case.k, case.v))
        level = torch.zeros(*q.shape[:3], 1, device=q.device, requires_grad=True)
        options = {"scale": SCALE, "causal": case.causal, "save_residual": True} | settings
        output, _, lse, _, _ = attention(q, k, v, level, case.mask, **options)
        dq, dk, dv, row_sum = torch.autograd.grad(output, (q, k, v, level), case.upstream)
        return Outcome(output.detach(), lse.detach(), row_sum.squeeze(-1), dq, dk, dv)

    return attend


@dataclass(frozen=True)
class Exact:
    """A case in FP64: P, the scores' maximum, output, lse, dq, ``P|V|``, and which rows are dead."""

    probabilities: Tensor
    scores: Tensor
    row_max: Tensor
    output: Tensor
    lse: Tensor
    dq: Tensor
    magnitude: Tensor
    dead: Tensor


def exact(case: Case) -> Exact:
    """The case in FP64; a row that may attend to nothing gives zeros."""
    wide = case.to(torch.float64)
    scores = SCALE * wide.q @ wide.k.transpose(-1, -2)
    if case.causal == "top_left":
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask, -torch.inf)
    row_max = scores.amax(-1)
    dead = row_max == -torch.inf
    probabilities = scores.softmax(-1).masked_fill(dead.unsqueeze(-1), 0.0)
    output = probabilities @ wide.v
    slope = wide.upstream @ wide.v.transpose(-1, -2)
    slope = probabilities * (slope - (probabilities * slope).sum(-1, keepdim=True))
    dq = SCALE * slope @ wide.k
    return Exact(probabilities, scores, row_max, output, scores.logsumexp(-1), dq, probabilities @ wide.v.abs(), dead)


def measure(case: Case, outcome: Outcome, oracle: Exact | None = None) -> Measured:
    """The figures of ``outcome`` against FP64 on the same 16-bit inputs."""
    truth = exact(case) if oracle is None else oracle
    alive = ~truth.dead
    size = (case.upstream.double().abs() * truth.magnitude).sum(-1)[alive]
    row_sum = outcome.row_sum.double()[alive]
    lse = outcome.lse.double()
    seen = (truth.scores - lse.unsqueeze(-1)).exp().sum(-1)[alive]
    error = (outcome.output.double() - truth.output).abs() / truth.magnitude.clamp(min=1e-300)
    gradients = (outcome.output, outcome.row_sum, outcome.dq, outcome.dk, outcome.dv)
    strange = sum(int((~torch.isfinite(part)).sum()) for part in gradients)
    zeros = (outcome.output == 0).all(-1) & (truth.output != 0).any(-1)
    return Measured(
        rho=float(row_sum.square().mean().sqrt() / size.square().mean().sqrt()),
        bias=float(row_sum.mean().abs() / size.mean()),
        row_sum_p=float((seen - 1).abs().max()),
        output=float(error[alive].max()) * 2**8,
        lse=float(((lse - truth.lse)[alive].abs() / (truth.row_max[alive].abs() + 10)).max()),
        nonfinite=strange + int((~torch.isfinite(lse[alive])).sum()),
        wrong_zeros=int(zeros.sum()),
        dead_gradient=float(outcome.dq[truth.dead].abs().max()) if bool(truth.dead.any()) else 0.0,
    )


def t_statistic(row_sum: Tensor) -> float:
    """How many standard errors the mean over sequences of rowsum dS is from zero; ``row_sum`` [sequences, ...]."""
    means = row_sum.double().flatten(1).mean(1)
    return float(means.mean() / (means.std() / len(means) ** 0.5))


def drift(attend: Attend, seed: int = 0, steps: int = 160, sequences: int = 8, rate: float = 1e-5) -> float:
    """How far W_Q of the twin sink runs away from FP64's: the spectral norm of dW - dW64 after ``steps`` SGD steps.

    q = q0 + x dW with dW from 0, fresh sequences in every step, dW -= rate * x^T dq; both start from one state and see
    the same inputs, q in the input format.
    """
    low = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for step in range(steps):
        low = low - rate * _gradient(twin_sink(seed, step, sequences), low, lambda moved: attend(moved).dq)
    return float(torch.linalg.matrix_norm(low - _exact_weight(seed, steps, sequences, rate), ord=2))


@lru_cache(maxsize=4)
def _exact_weight(seed: int, steps: int, sequences: int, rate: float) -> Tensor:
    weight = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for step in range(steps):
        weight = weight - rate * _gradient(twin_sink(seed, step, sequences), weight, lambda moved: exact(moved).dq)
    return weight


def _gradient(case: Case, weight: Tensor, slope: Callable[[Case], Tensor]) -> Tensor:
    x = case.x.double()
    moved = case.q.double() + (x @ weight).unsqueeze(1)
    gradient = slope(replace(case, q=moved.to(case.q.dtype)))
    return torch.einsum("bti,btj->ij", x, gradient.double().squeeze(1))
