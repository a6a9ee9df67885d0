"""Attention in float64 by plain PyTorch and autograd, from the same arguments as the kernels: what those must match."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Oracle:
    """Everything in float64. `gradients`: q, k, v, bias, sinks, None where not asked."""

    output: Tensor
    lse: Tensor
    max_logits: Tensor
    gradients: tuple[Tensor | None, ...]


def allowed_keys(arguments) -> Tensor:
    """Bool [B, H, Sq, Sk] from causality, window and mask."""
    batch, heads, rows, _ = arguments.q.shape
    keys = arguments.k.shape[2]
    device = arguments.q.device
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - arguments.key_offset
    left, right = arguments.bounds
    allowed = torch.ones(batch, heads, rows, keys, dtype=torch.bool, device=device)
    if right is not None:
        allowed &= distance <= right
    if left is not None:
        allowed &= distance >= -left
    if arguments.mask is not None:
        allowed &= arguments.mask
    return allowed


def logits(arguments, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Scores [B, H, Sq, Sk] in the precision of q, -inf where excluded."""
    scores = (q @ k.repeat_interleave(arguments.group, 1).transpose(-1, -2)) * arguments.scale
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


def oracle(arguments, kept: Tensor | None = None, output_gradient=None, lse_gradient=None) -> Oracle:
    """The forward, and the backward where `output_gradient` is given. `kept`: the dropout mask, [B, H, Sq, Sk]."""
    inputs = [arguments.q, arguments.k, arguments.v, arguments.bias, arguments.sinks]
    leaves = [None if t is None else t.detach().double().requires_grad_(output_gradient is not None) for t in inputs]
    q, k, v, bias, sinks = leaves
    scores = logits(arguments, q, k, bias)
    rows = scores if sinks is None else torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    if rows.shape[-1] == 0:
        rows = rows.new_full((*rows.shape[:3], 1), float("-inf"))
    dead = (rows == float("-inf")).all(-1, keepdim=True)
    lse = torch.logsumexp(rows.masked_fill(dead, 0.0), -1).masked_fill(dead.squeeze(-1), float("-inf"))
    probabilities = torch.softmax(rows.masked_fill(dead, 0.0), -1)[..., : scores.shape[-1]].masked_fill(dead, 0.0)
    if kept is not None:
        probabilities = probabilities * kept * arguments.keep_scale
    output = probabilities @ v.repeat_interleave(arguments.group, 1)
    if arguments.dead_rows == "nan":
        output = output.masked_fill(dead, float("nan"))
    gradients: tuple[Tensor | None, ...] = (None,) * 5
    if output_gradient is not None:
        outputs, upstream = [output], [output_gradient.double()]
        if lse_gradient is not None:
            outputs.append(lse.masked_fill(dead.squeeze(-1), 0.0))
            upstream.append(lse_gradient.double())
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(outputs, wanted, upstream))
        gradients = tuple(None if leaf is None else next(found) for leaf in leaves)
        if arguments.dead_rows == "nan":  # P of a dead row is NaN for every key, so dV is; excluded scores get zeros
            shared = dead.flatten(2).any(-1).unflatten(1, (-1, arguments.group)).any(-1)
            gradients[2][shared] = float("nan")
    largest = scores.detach().amax((2, 3)) if scores.shape[-1] and scores.shape[-2] else scores.new_zeros(0)
    return Oracle(output.detach(), lse.detach(), largest, gradients)
