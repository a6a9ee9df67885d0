"""Attention as a model would write it, in FP64 and differentiable: the oracle of the attention tests."""

import torch
from torch import Tensor


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float = 1.0,
    score=lambda s: s,
    softcap: float = 0.0,
    clip=lambda x: x,
    allowed: Tensor | None = None,
    kept: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(output, lse, probabilities, dropped probabilities)``; rows that may attend to nothing give zeros and -inf."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = score(scale * (q @ k.transpose(-1, -2)))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = clip(scores)
    if bias is not None:
        scores = scores + bias
    for part in (mask, allowed):
        if part is not None:
            scores = scores.masked_fill(~part, -torch.inf)
    keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    safe = scores.masked_fill(dead, 0.0)
    # Not torch.logsumexp: its gradient, exp(x - lse), sums to more than 1 where x is finfo.min.
    row_max = safe.detach().amax(-1, keepdim=True) if safe.shape[-1] else safe.new_zeros(*safe.shape[:-1], 1)
    lse = ((safe - row_max).exp().sum(-1).log() + row_max.squeeze(-1)).masked_fill(dead.squeeze(-1), -torch.inf)
    probabilities = safe.softmax(-1).masked_fill(dead, 0.0)[..., :keys]
    dropped = probabilities if kept is None else probabilities * kept * keep_scale
    return dropped @ v, lse, probabilities, dropped


def band(queries: int, keys: int, causal: str, left: int, right: int) -> Tensor:
    """Which keys a row may see: the definition, element by element."""
    offset = keys - queries if causal == "bottom_right" else 0
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for row in range(queries):
        for key in range(keys):
            place = key - row - offset
            seen[row, key] = not (
                (causal != "none" and place > 0) or (left >= 0 and place < -left) or (right >= 0 and place > right)
            )
    return seen


# Largest error, relative to the largest magnitude of the tensor. FP64 and FP32: a few dozen roundings of sums over
# tens of terms. 16-bit: P, dS and the result are rounded once each, 2^-9 and 2^-12 at worst a rounding; measured on
# the shapes of these tests with ten seeds: at most 1.9 roundings of the largest element; allowed are 4.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4 * 2.0**-12, torch.bfloat16: 4 * 2.0**-9}


def assert_near(value: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raises AssertionError unless ``value`` is within the format's tolerance of the FP64 ``truth``."""
    assert value.shape == truth.shape, what
    same_infinity = value.double().isfinite() == truth.isfinite()
    assert bool(same_infinity.all()), f"{what}: other elements are finite"
    if not truth.numel():
        return
    value, truth = value.detach(), truth.detach()
    error = float((value.double() - truth).nan_to_num(0.0).abs().max())
    size = max(float(truth.nan_to_num(0.0, 0.0, 0.0).abs().max()), 1e-2)
    assert error <= TOLERANCE[dtype] * size, f"{what}: error {error:.3g} on a size of {size:.3g}"


def compare(run, truth, tensors: list[Tensor], *, probabilities: int | None = None) -> None:
    """The op through ``run(*tensors)`` against ``truth(*FP64 copies)``: outputs and every gradient.

    ``truth`` returns what ``eager`` does; ``probabilities``: 2 or 3, which of it the op's fifth output is. The
    gradients flow through output, lse and probabilities at once.
    """
    dtype = tensors[0].dtype
    tensors = [part.detach().requires_grad_() for part in tensors]
    wide = [part.detach().double().requires_grad_() for part in tensors]
    output, _, lse, _, weights = run(*tensors)
    expected = truth(*wide)
    pairs = [(output, expected[0], dtype), (lse, expected[1], torch.promote_types(dtype, torch.float32))]
    if probabilities is not None:
        pairs.append((weights, expected[probabilities], dtype))
    generator = torch.Generator().manual_seed(1)
    loss = loss_wide = 0.0
    for place, (value, exact, format_) in enumerate(pairs):
        assert_near(value, exact, format_, f"output {place}")
        upstream = torch.randn(exact.shape, generator=generator).to(value.dtype)
        finite = exact.isfinite()
        loss = loss + (value.double() * upstream.double())[finite].sum()
        loss_wide = loss_wide + (exact * upstream.double())[finite].sum()
    gradients = torch.autograd.grad(loss, tensors)
    truths = torch.autograd.grad(loss_wide, wide)
    for place, (value, exact, like) in enumerate(zip(gradients, truths, tensors, strict=True)):
        assert value.dtype == like.dtype
        assert_near(value, exact, dtype, f"gradient {place}")


def draw(dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Standard normal tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
