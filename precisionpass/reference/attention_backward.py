"""The backward of attention (NUMERICS section 3): P recomputed from the lse, delta from the unrounded output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.numerics.formats import decode_residual
from precisionpass.reference.attention import dropout_mask, heads_last
from precisionpass.reference.blocks import Block, blocks
from precisionpass.reference.scores import exclude, logits, logits_backward, raw_product, reshapes

if TYPE_CHECKING:
    from precisionpass.hooks.collector import Collector
    from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved

PRECISE_LSE = 256.0
"""Above it FP32's spacing of the lse passes 1.5e-5, which would be a relative error of P."""


def backward(
    gradients: Gradients, arguments: AttentionArguments, saved: Saved, collector: Collector | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """``(dq, dk, dv, dbias, dsinks, [dscore_input, ...])`` in the inputs' formats and shapes; [0] where not needed.

    P and dS are rounded to the input format before their products, as a kernel does; sums are FP32.
    collector: sees scores, P and rowsum dS, where given.
    """
    totals = Totals(gradients, arguments)
    upstream = gradients.output
    statistics = arguments.compute_dtype
    for block in blocks(arguments):
        query, key = block.stack(arguments.q, statistics), block.stack_keys(arguments.k, statistics)
        raw = raw_product(arguments, query, key, block)
        scores = logits(arguments, raw, block, keep_raw=reshapes(arguments), collector=collector)
        lse = saved.lse[block.batch, block.heads, block.rows].unsqueeze(-1)
        dead = lse == -torch.inf
        shift = lse.masked_fill(dead, torch.inf)
        weights = scores.sub_(shift).exp_()
        sink = 0.0 if arguments.sinks is None else torch.exp(block.of(arguments.sinks).to(statistics) - shift)
        weights, sink = _normalised(weights, sink, lse)
        if collector is not None:
            collector.weights(block, weights, sink, dead)
        if arguments.dead_rows == "nan":
            weights.masked_fill_(dead, torch.nan)
        kept = dropout_mask(arguments, block)
        output_gradient = block.stack(upstream, statistics)
        if totals.value is not None:
            totals.add_value(_rounded_weights(arguments, weights, kept), output_gradient, block)
        if not totals.needs_scores and (collector is None or not collector.wants("delta_bias")):
            continue
        value = block.stack_keys(arguments.v, statistics)
        slope = block.unstack(torch.bmm(output_gradient, value.transpose(1, 2)))
        if kept is not None:
            slope.mul_(kept).mul_(arguments.keep_scale)
        extra = _probability_gradient(gradients, arguments, block, kept)
        if extra is not None:
            slope.add_(extra)
        delta = _delta(gradients, arguments, saved, block, upstream, weights, slope, extra, sink)
        slope.sub_(delta).mul_(weights)
        if not bool(delta.isfinite().all()):
            _zero_excluded(arguments, slope, block)
        if collector is not None:
            collector.row_sum(block, _surplus(gradients, slope, delta, sink, block))
        if totals.bias is not None:
            block.add_to(totals.bias, slope)
        if totals.sinks is not None:
            block.add_to(totals.sinks, delta.mul(sink).neg_())
        if reshapes(arguments):
            slope = logits_backward(arguments, raw, slope, block, totals.inputs)
        if arguments.rounds:
            slope.copy_(slope.to(arguments.q.dtype))
        totals.add_query_and_key(slope, query, key, block)
    return totals.results()


def _normalised(weights: Tensor, sink: Tensor | float, lse: Tensor) -> tuple[Tensor, Tensor | float]:
    """P and the sink's share, divided by their sum in rows whose lse is too large to hold log l (in place).

    In a row whose every key carries a fill of finfo.min or -1e4 the lse is the maximum, and P would sum to their count.
    """
    large = (lse.abs() > PRECISE_LSE) & lse.isfinite()
    if not bool(large.any()):
        return weights, sink
    share = (weights.sum(-1, keepdim=True) + sink).masked_fill_(~large, 1.0)
    return weights.div_(share), sink / share


def _rounded_weights(arguments: AttentionArguments, weights: Tensor, kept: Tensor | None) -> Tensor:
    rounded = weights.to(arguments.q.dtype).to(weights.dtype) if arguments.rounds else weights
    return rounded if kept is None else rounded * kept


def _probability_gradient(
    gradients: Gradients, arguments: AttentionArguments, block: Block, kept: Tensor | None
) -> Tensor | None:
    """What arrives through the returned probabilities, as a gradient of P; None where nothing does."""
    if gradients.probabilities is None:
        return None
    extra = block.of(gradients.probabilities).to(arguments.compute_dtype)
    if arguments.probabilities == "dropped" and kept is not None:
        extra = extra * kept * arguments.keep_scale
    return extra


def _delta(
    gradients: Gradients,
    arguments: AttentionArguments,
    saved: Saved,
    block: Block,
    upstream: Tensor,
    weights: Tensor,
    slope: Tensor,
    extra: Tensor | None,
    sink: Tensor | float,
) -> Tensor:
    """The row's mean of dP under P, [sequences, heads, rows, 1], less the gradient of the lse.

    From the saved output where delta is "output"; from output and residual where it is "residual" and the forward
    kept one; else summed again from P and dP, which needs nothing saved. So it is in FP32, where nothing is rounded: on
    a saturated row dP and delta are all but equal, and only a delta of the same dP leaves the right difference.
    """
    place = (block.batch, block.heads, block.rows)
    if arguments.delta == "recompute" or (arguments.delta == "residual" and not saved.has_residual):
        share = weights.sum(-1, keepdim=True) + sink
        delta = (weights * slope).sum(-1, keepdim=True).div_(share.masked_fill(share == 0, 1.0))
    else:
        output = saved.output[place]
        if arguments.delta == "residual":
            output = decode_residual(output, saved.residual[place])
        delta = (upstream[place].to(weights.dtype) * output).sum(-1, keepdim=True)
        if extra is not None:
            delta.add_((weights * extra).sum(-1, keepdim=True))
    if gradients.lse is not None:
        delta.sub_(gradients.lse[place].unsqueeze(-1))
    return delta


def _surplus(gradients: Gradients, slope: Tensor, delta: Tensor, sink: Tensor | float, block: Block) -> Tensor:
    """rowsum dS, the sink's part with it, less what the gradient of the lse asks for: 0 in exact arithmetic."""
    row_sum = slope.sum(-1, keepdim=True) - delta * sink
    if gradients.lse is not None:
        row_sum = row_sum - gradients.lse[block.batch, block.heads, block.rows].unsqueeze(-1)
    return row_sum


def _zero_excluded(arguments: AttentionArguments, slope: Tensor, block: Block) -> None:
    """A key that a mask excludes gets an exact zero, also where 0 * inf is NaN, as ``masked_fill`` gives in eager."""
    if arguments.mask is not None:
        slope.masked_fill_(block.of(arguments.mask).logical_not(), 0.0)
    exclude(arguments, slope, block, 0.0)


class Totals:
    """The gradients under construction: dq block by block, the others summed in FP32 (FP64 for FP64 inputs)."""

    def __init__(self, gradients: Gradients, arguments: AttentionArguments) -> None:
        self._arguments = arguments
        needs_q, needs_k, needs_v, needs_bias, needs_sinks, *needs_inputs = gradients.needs
        self.query = heads_last(arguments.q, arguments.q.shape, arguments.q.dtype) if needs_q else None
        self.key = self._zeros(arguments.k) if needs_k else None
        self.value = self._zeros(arguments.v) if needs_v else None
        self.bias = self._zeros(arguments.bias) if needs_bias else None
        self.sinks = self._zeros(arguments.sinks) if needs_sinks else None
        self.inputs = {
            index: self._zeros(arguments.score_inputs[index]) for index, needed in enumerate(needs_inputs) if needed
        }
        self.needs_scores = needs_q or needs_k or needs_bias or needs_sinks or bool(self.inputs)

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=self._arguments.compute_dtype, device=like.device)

    def add_value(self, weights: Tensor, output_gradient: Tensor, block: Block) -> None:
        """dV += P^T dO for the keys of a block."""
        target = self._keys_of(self.value, block)
        target.baddbmm_(block.restack(weights).transpose(1, 2), output_gradient, alpha=self._arguments.keep_scale)

    def add_query_and_key(self, slope: Tensor, query: Tensor, key: Tensor, block: Block) -> None:
        """dQ = scale * dS K for the rows of a block, dK += scale * dS^T Q for its keys."""
        slope, scale = block.restack(slope), self._arguments.scale
        if self.query is not None:
            product = block.unstack(torch.bmm(slope, key).mul_(scale))
            self.query[block.batch, block.heads, block.rows] = product
        if self.key is not None:
            self._keys_of(self.key, block).baddbmm_(slope.transpose(1, 2), query, alpha=scale)

    def _keys_of(self, total: Tensor, block: Block) -> Tensor:
        part = total[block.batch, block.key_heads, block.keys]
        return part.view(part.shape[0] * part.shape[1], *part.shape[2:])

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """All gradients in their inputs' formats; an empty [0] for each that nobody wants."""
        arguments = self._arguments
        return (
            arguments.q.new_empty(0) if self.query is None else self.query,
            self._heads_last(self.key, arguments.k),
            self._heads_last(self.value, arguments.v),
            self._finished(self.bias, arguments.bias),
            self._finished(self.sinks, arguments.sinks),
            [self._finished(self.inputs.get(index), like) for index, like in enumerate(arguments.score_inputs)],
        )

    def _heads_last(self, total: Tensor | None, like: Tensor) -> Tensor:
        if total is None:
            return like.new_empty(0)
        return heads_last(like, like.shape, like.dtype).copy_(total)

    def _finished(self, total: Tensor | None, like: Tensor | None) -> Tensor:
        if total is None:
            return (self._arguments.q if like is None else like).new_empty(0)
        return total.to(like.dtype)
