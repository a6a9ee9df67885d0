"""Attention with a consistent normaliser and an unbiased backward, in plain PyTorch (NUMERICS section 3).

    m    = rowmax S                        s = m, 0 where m = -inf (or the bounded shift, NUMERICS 2)
    P    = exp(S - s), FP32                Pb = P rounded to the input format
    l    = sum P + exp(sink - s)           lb = sum Pb + exp(sink - s)
    O32  = (Pb V) / lb, 0 where lb = 0     O = O32 rounded;  r8 = the int8 residual of that rounding
    lse  = s + log(l)
    backward:  P = exp(S - lse);  delta = sum dO*(O + r8*ulp(O)/254) - dlse;  dS = P*(dP - delta)

FP32 and FP64 inputs are not rounded anywhere, so they have no residual; delta is rowsum(P dP) / rowsum(P) - dlse.

With FP8 products the operands are cast first, and stand for what they were cast to. exp(s) is rounded up to a power of
two, so that P is rounded alike in every block; Pb = fp8(2^8 P) / 2^8, lse = s + log(lb), and there is no residual.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.numerics.formats import encode_residual
from precisionpass.numerics.fp8 import PROBABILITY_SCALE, quantise, rounded
from precisionpass.reference.blocks import Block, blocks
from precisionpass.reference.dropout import keep_mask
from precisionpass.reference.scores import logits, raw_product

if TYPE_CHECKING:
    from precisionpass.hooks.collector import Collector
    from precisionpass.ops.arguments import AttentionArguments

SINK_ROOM = 60.0
"""Logits of a sink above the largest score at which exp is still far from FP32's end."""


def forward(
    arguments: AttentionArguments, collector: Collector | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(output, residual, lse, max_logits, probabilities)``, as the op's schema states them; [0] where not asked.

    collector: sees scores and probabilities, where given.
    """
    q, statistics = arguments.q, arguments.compute_dtype
    sequences, heads, queries, _ = q.shape
    keys, width = arguments.v.shape[2:]
    output = heads_last(q, (sequences, heads, queries, width), q.dtype)
    residual = heads_last(q, output.shape, torch.int8) if arguments.keeps_residual else q.new_empty(0, dtype=torch.int8)
    lse = q.new_empty((sequences, heads, queries), dtype=statistics)
    max_logits = q.new_full((sequences, heads) if arguments.return_max_logits else (0,), -torch.inf, dtype=statistics)
    shape = (sequences, heads, queries, keys) if arguments.probabilities != "none" else (0,)
    probabilities = q.new_zeros(shape)
    query_operand, key_operand, value_operand = operands(arguments)
    for block in blocks(arguments):
        query = block.stack(query_operand, statistics)
        raw = raw_product(arguments, query, block.stack_keys(key_operand, statistics), block)
        scores = logits(arguments, raw, block, collector=collector)
        row_max = _row_max(scores)
        if arguments.return_max_logits:
            largest = max_logits[block.batch, block.heads]
            torch.maximum(largest, row_max.amax((2, 3)), out=largest)
        shift, sink = _shift_and_sink(arguments, scores, row_max, block)
        weights = scores.sub_(shift).exp_()
        normaliser = weights.sum(-1, keepdim=True).add_(sink)
        precise, dead = normaliser, normaliser == 0
        if collector is not None:
            collector.weights(block, weights / normaliser.masked_fill(dead, 1.0))
        kept = dropout_mask(arguments, block)
        if arguments.probabilities != "none":
            probabilities[block.batch, block.heads, block.rows, block.keys] = _probabilities(
                arguments, block, weights, normaliser, dead, kept
            )
        if arguments.rounds:
            weights.copy_(_rounded(arguments, weights))
            if arguments.normaliser == "rounded":
                normaliser = weights.sum(-1, keepdim=True).add_(sink)
        summed = precise if arguments.products.pv is None else normaliser
        lse[block.batch, block.heads, block.rows] = (shift + summed.log()).squeeze(-1)
        if kept is not None:
            weights.mul_(kept)
        product = block.unstack(torch.bmm(block.restack(weights), block.stack_keys(value_operand, statistics)))
        exact = product.div_(normaliser).mul_(arguments.keep_scale)
        exact.masked_fill_(dead, dead_value(arguments, block))
        _store(arguments, output, residual, exact, block)
    return output, residual, lse, max_logits, probabilities


def operands(arguments: AttentionArguments) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the products read them: those of an FP8 product as the FP32 numbers that their codes stand for."""
    qk, pv, scale = arguments.products
    q, k, v = arguments.q, arguments.k, arguments.v
    if qk is not None:
        q, k = (quantise(part, qk, scale).values for part in (q, k))
    if pv is not None:
        v = quantise(v, pv, scale, by_column=True).values
    return q, k, v


def _rounded(arguments: AttentionArguments, weights: Tensor) -> Tensor:
    """P in the format that multiplies V; that of FP8 is scaled first, by a power of two."""
    dtype = arguments.products.pv
    if dtype is None:
        return weights.to(arguments.q.dtype)
    scale = PROBABILITY_SCALE[dtype]
    return rounded(weights * scale, dtype).div_(scale)


def heads_last(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised [B, H, S, W] whose memory is [B, S, H, W]: the layout of the op's outputs and gradients."""
    sequences, heads, length, width = shape
    return like.new_empty((sequences, length, heads, width), dtype=dtype).transpose(1, 2)


def _row_max(scores: Tensor) -> Tensor:
    if not scores.shape[-1]:
        return scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    return scores.amax(-1, keepdim=True)


def _shift_and_sink(
    arguments: AttentionArguments, scores: Tensor, row_max: Tensor, block: Block
) -> tuple[Tensor, Tensor | float]:
    """What is subtracted from a row before exp, and the sink's exp(sink - shift), 0 without sinks."""
    shift = row_max
    if arguments.row_max_shift:
        shift = bounded_shift(scores, row_max, *arguments.row_max_shift)
    sink = None
    if arguments.sinks is not None:
        sink = block.of(arguments.sinks).to(scores.dtype)
        # The P of an FP8 product is scaled by its own maximum; a sink joins the sum alone, up to what FP32 can hold.
        shift = torch.maximum(shift, sink if arguments.products.pv is None else sink - SINK_ROOM)
    if arguments.products.pv is not None:
        power = shift.div(math.log(2)).ceil_()
        shift = torch.where(power.abs() < 2.0**22, power.mul_(math.log(2)), shift)  # beyond, FP32 has no fraction left
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    return shift, 0.0 if sink is None else torch.exp(sink - shift)


def bounded_shift(scores: Tensor, row_max: Tensor, beta: float, limit: float, tolerance: float) -> Tensor:
    """The paper's shift of rows whose maximum repeats, bounded (NUMERICS 2): s >= m, at most ``limit`` above it.

    A maximum repeats where two scores or more stand within ``tolerance`` of it.
    """
    repeats = (scores >= row_max - tolerance).sum(-1, keepdim=True) > 1
    upper = row_max + limit
    shifted = torch.where(row_max > 0, torch.minimum(beta * row_max, upper), upper.clamp(max=0.0))
    return torch.where(repeats & (row_max != 0), torch.maximum(row_max, shifted), row_max)


def dead_value(arguments: AttentionArguments, block: Block) -> float:
    """What a row without an allowed key gives; where there is no key at all it is an empty sum, whatever the rule."""
    exists = block.sequence.keys.stop > block.sequence.keys.start
    return torch.nan if arguments.dead_rows == "nan" and exists else 0.0


def dropout_mask(arguments: AttentionArguments, block: Block) -> Tensor | None:
    """Bool [sequences, heads, rows, keys], True where a probability is kept; None without dropout."""
    if arguments.dropout_p == 0.0:
        return None
    _, heads, queries, _ = arguments.q.shape
    device = arguments.q.device
    parts = (block.batch, block.heads, block.rows)
    batch, head, row = (torch.arange(part.start, part.stop, device=device) for part in parts)
    row_number = (batch[:, None] * heads + head)[..., None] * queries + row
    begin = block.sequence.keys.start
    keys = slice(block.keys.start - begin, block.keys.stop - begin)
    return keep_mask(arguments.seed, arguments.dropped_share, row_number, keys, arguments.k.shape[2])


def _probabilities(
    arguments: AttentionArguments, block: Block, weights: Tensor, normaliser: Tensor, dead: Tensor, kept: Tensor | None
) -> Tensor:
    result = (weights / normaliser).masked_fill_(dead, dead_value(arguments, block))
    if arguments.probabilities == "dropped" and kept is not None:
        result.mul_(kept).mul_(arguments.keep_scale)
    return result


def _store(arguments: AttentionArguments, output: Tensor, residual: Tensor, exact: Tensor, block: Block) -> None:
    if arguments.output_clip > 0:
        exact.clamp_(-arguments.output_clip, arguments.output_clip)
    place = (block.batch, block.heads, block.rows)
    rounded = exact.to(output.dtype)
    output[place] = rounded
    if arguments.keeps_residual:
        residual[place] = encode_residual(exact, rounded)
