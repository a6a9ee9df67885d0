"""Attention in float64 by plain PyTorch and autograd, from the same arguments as the kernels: what those must match."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precisionpass.score.evaluate import evaluate
from precisionpass.score.grammar import parse


@dataclass(frozen=True)
class Oracle:
    """Everything in float64. `gradients`: q, k, v, bias, sinks, score inputs, None where not asked."""

    output: Tensor
    lse: Tensor
    max_logits: Tensor
    gradients: tuple[Tensor | None, ...]
    probabilities: Tensor


def allowed_keys(arguments) -> Tensor:
    """Bool [B, H, Sq, Sk] from causality, window and mask."""
    batch, heads, rows, _ = arguments.q.shape
    keys = arguments.k.shape[2]
    device = arguments.q.device
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - arguments.key_offset
    left, right = arguments.bounds
    allowed = torch.ones(batch, heads, rows, keys, dtype=torch.bool, device=device)
    if arguments.packed:
        distance, together = _distance_within(arguments)
        allowed &= together
    if right is not None:
        allowed &= distance <= right
    if left is not None:
        allowed &= distance >= -left
    if arguments.mask is not None:
        allowed &= arguments.mask
    return allowed


def _score(arguments, scores: Tensor) -> Tensor:
    """The score expression as plain PyTorch, for autograd to differentiate."""
    names = {"s": scores}
    for index, tensor in enumerate(arguments.score_inputs):
        names[f"t{index}"] = tensor
    device = scores.device
    places = [torch.arange(size, device=device) for size in scores.shape]
    if arguments.packed:
        places[0], places[2], _ = _within(arguments.cu_seqlens_q, scores.shape[2])
        _, places[3], _ = _within(arguments.cu_seqlens_k, scores.shape[3])
        axes = (2, 1, 2, 3)
    else:
        axes = (0, 1, 2, 3)
    for name, place, axis in zip("bhij", places, axes, strict=True):
        names[name] = place.to(scores.dtype).view([-1 if other == axis else 1 for other in range(4)])
    return evaluate(parse(arguments.score), names, scores).expand(scores.shape)


def _within(bounds: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, place in it, length of it) of each of `total` rows or keys; -1 and 0 behind the last sequence."""
    index = torch.arange(total, device=bounds.device)
    number = torch.searchsorted(bounds.long(), index, right=True) - 1
    exists = number < len(bounds) - 1
    length = bounds[number.clamp(max=len(bounds) - 2) + 1] - bounds[number]
    return torch.where(exists, number, -1), index - bounds[number], torch.where(exists, length, 0)


def _distance_within(arguments) -> tuple[Tensor, Tensor]:
    """(j - i - offset, counted within each row's and key's own sequence; whether the two are of one)."""
    row_of, row, rows = _within(arguments.cu_seqlens_q, arguments.q.shape[2])
    key_of, key, keys = _within(arguments.cu_seqlens_k, arguments.k.shape[2])
    offset = keys - rows[:, None] if arguments.causal == "bottom_right" else 0
    return key - row[:, None] - offset, (row_of[:, None] == key_of) & (key_of >= 0)


def logits(arguments, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Scores [B, H, Sq, Sk] in the precision of q, -inf where excluded."""
    scores = (q @ k.repeat_interleave(arguments.group, 1).transpose(-1, -2)) * arguments.scale
    if arguments.score != "s":
        scores = _score(arguments, scores)
    if arguments.softcap > 0:
        scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
    limit = arguments.logit_clip_max
    if arguments.logit_clip == "hard":
        scores = scores.clamp(-limit, limit)
    if arguments.logit_clip == "tanh":
        scores = limit * torch.tanh(scores / limit)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~allowed_keys(arguments), float("-inf"))


def oracle(
    arguments, kept: Tensor | None = None, output_gradient=None, lse_gradient=None, probability_gradient=None
) -> Oracle:
    """The forward, and the backward where `output_gradient` is given. `kept`: the dropout mask, [B, H, Sq, Sk]."""
    inputs = [arguments.q, arguments.k, arguments.v, arguments.bias, arguments.sinks, *arguments.score_inputs]
    leaves = [
        t if t is None or t.dtype == torch.bool else t.detach().double().requires_grad_(output_gradient is not None)
        for t in inputs
    ]
    q, k, v, bias, sinks, *read = leaves
    scores = logits(replace(arguments, score_inputs=tuple(read)), q, k, bias)
    rows = scores if sinks is None else torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    if rows.shape[-1] == 0:
        rows = rows.new_full((*rows.shape[:3], 1), float("-inf"))
    dead = (rows == float("-inf")).all(-1, keepdim=True)
    lse = torch.logsumexp(rows.masked_fill(dead, 0.0), -1).masked_fill(dead.squeeze(-1), float("-inf"))
    probabilities = torch.softmax(rows.masked_fill(dead, 0.0), -1)[..., : scores.shape[-1]].masked_fill(dead, 0.0)
    dropped = probabilities if kept is None else probabilities * kept * arguments.keep_scale
    returned = dropped if arguments.probabilities == "dropped" else probabilities
    output = dropped @ v.repeat_interleave(arguments.group, 1)
    if arguments.output_clip > 0:
        output = output.clamp(-arguments.output_clip, arguments.output_clip)
    if arguments.dead_rows == "nan":
        output, returned = output.masked_fill(dead, float("nan")), returned.masked_fill(dead, float("nan"))
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if output_gradient is not None:
        outputs, upstream = [output], [output_gradient.double()]
        if lse_gradient is not None:
            outputs.append(lse.masked_fill(dead.squeeze(-1), 0.0))
            upstream.append(lse_gradient.double())
        if probability_gradient is not None:
            outputs.append(returned)
            upstream.append(probability_gradient.double())
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, upstream, materialize_grads=True))
        gradients = tuple(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)
        if arguments.dead_rows == "nan":  # P of a dead row is NaN for every key, so dV is; excluded scores get zeros
            shared = dead.flatten(2).any(-1).unflatten(1, (-1, arguments.group)).any(-1)
            gradients[2][shared] = float("nan")
    largest = scores.detach().amax((2, 3)) if scores.shape[-1] and scores.shape[-2] else scores.new_zeros(0)
    return Oracle(output.detach(), lse.detach(), largest, gradients, returned.detach())
