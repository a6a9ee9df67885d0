"""Attention on a GPU: what to launch for the forward and the backward, as the reference specifies them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from precisionpass.kernels import hopper, tuning
from precisionpass.kernels.attention_backward import key_value_gradients, query_gradients
from precisionpass.kernels.attention_bias import bias_gradients
from precisionpass.kernels.attention_combine import combine_splits
from precisionpass.kernels.attention_forward import attention_forward
from precisionpass.kernels.attention_probabilities import write_probabilities
from precisionpass.kernels.attention_rows import prepare_rows, revisit_rows
from precisionpass.kernels.figures import magnitudes, record
from precisionpass.kernels.fp8_operands import quantise_operands
from precisionpass.kernels.hopper import chosen
from precisionpass.kernels.launch import NO_STRIDES, Plan, describable, heads_last, launch, strides_of
from precisionpass.kernels.limits import supports
from precisionpass.kernels.row_statistics import RowStatistics
from precisionpass.kernels.variant import Variant

if TYPE_CHECKING:
    from precisionpass.hooks.collector import Collector
    from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved

__all__ = ["backward", "chosen", "forward", "magnitudes", "supports"]

WIDEST_TWO_LEVEL = 128  # wider, a second accumulator does not fit the registers
ROWS_AT_A_TIME = 32


def forward(arguments: AttentionArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(output, residual, lse, max_logits, probabilities) as the op's schema states them; [0] where not asked.

    q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], any strides; nothing is copied. The caller has made sure that
    `supports` gives None.
    """
    q, v = arguments.q, arguments.v
    shape = (*q.shape[:3], v.shape[3])
    output = heads_last(q, shape, q.dtype)
    residual = heads_last(q, shape, torch.int8) if arguments.keeps_residual else q.new_empty(0, dtype=torch.int8)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    row_max = torch.empty_like(lse) if arguments.return_max_logits else lse.new_empty(0)
    shape = (*q.shape[:3], v.shape[2]) if arguments.probabilities != "none" else (0,)
    probabilities = torch.empty(shape, dtype=q.dtype, device=q.device)
    if output.numel() == 0:
        return output, residual, _empty_lse(arguments, lse), _largest(arguments, row_max, q), probabilities

    with torch.cuda.device_of(q):
        plan = Plan(arguments)
        if probabilities.numel():
            _write_probabilities(plan, probabilities)
        if hopper.refusal(plan) is None:
            hopper.forward(launch, plan, output, residual, lse, row_max)
            return output, residual, lse, _largest(arguments, row_max, q), probabilities
        if arguments.products.any:
            quantise_operands(plan, launch)
        tile = plan.tile(tuning.FORWARD)
        two_level = arguments.normaliser == "rounded" and not plan.exact and plan.value_width <= WIDEST_TWO_LEVEL
        variant = plan.variant_for(
            tile,
            rounded_normaliser=arguments.normaliser == "rounded",
            two_level=two_level,
            deferred=two_level and tile.deferred,
            ones_width=tile.ones_width,
            precise_log_sum=not arguments.keeps_residual and arguments.products.pv is None,
            residual=arguments.keeps_residual,
            # One program on a multiprocessor: the copy engine stores beside it; of several, each stores for itself.
            residual_descriptor=arguments.keeps_residual and plan.variant["descriptors"] and tile.warps > 4,
            sinks=arguments.sinks is not None,
            row_max=arguments.return_max_logits,
            output_clip=arguments.output_clip > 0,
            row_max_shift=bool(arguments.row_max_shift),
        )
        programs = plan.query_programs(tile.query_block)
        splits = plan.splits(tile, programs)
        if splits > 1:
            _forward_in_parts(plan, tile, variant, splits, output, residual, lse, row_max)
            return output, residual, lse, _largest(arguments, row_max, q), probabilities
        target, strides = plan.tiled(output, tile.query_block, plan.value_width)
        if variant.residual_descriptor:
            steps, steps_strides = plan.tiled(residual, tile.query_block, plan.value_width)
        else:
            steps, steps_strides = (residual, strides_of(residual)) if arguments.keeps_residual else (None, NO_STRIDES)
        launch(
            attention_forward, programs, tile,
            *plan.inputs(tile), plan.survey(launch, tile), arguments.sinks, strides_of(arguments.sinks),
            arguments.seed, target, strides, steps, steps_strides, lse, row_max if variant.row_max else None,
            *plan.sizes(), 1,
            VARIANT=variant, QUERY_BLOCK=tile.query_block, KEY_BLOCK=tile.key_block,
        )  # fmt: skip
    return output, residual, lse, _largest(arguments, row_max, q), probabilities


def _forward_in_parts(
    plan: Plan, tile: tuning.Tile, variant: Variant, splits: int, output: Tensor, residual: Tensor, lse: Tensor, row_max
) -> None:
    """Few rows, many keys: `splits` programs share the keys of a block of rows, another kernel combines them."""
    arguments, value_dim = plan.arguments, output.shape[3]
    count = plan.heads * splits
    parts = torch.empty((plan.batch, count, plan.query_count, value_dim), dtype=torch.float32, device=output.device)
    part_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=output.device)
    part_max = torch.empty_like(part_lse) if variant.row_max else None
    partial = replace(variant, split=True, residual=False, dead_rows=True, dead_rows_nan=False, output_clip=False)
    launch(
        attention_forward, plan.query_programs(tile.query_block) * splits, tile,
        *plan.inputs(tile), None, None, NO_STRIDES, arguments.seed, parts, strides_of(parts), None, NO_STRIDES,
        part_lse, part_max, *plan.sizes(), splits,
        VARIANT=partial, QUERY_BLOCK=tile.query_block, KEY_BLOCK=tile.key_block,
    )  # fmt: skip
    launch(
        combine_splits, plan.batch * plan.heads * plan.query_count, tuning.Tile(1, 1, 4, 1),
        parts, part_lse, part_max, output, strides_of(output), residual if variant.residual else None,
        strides_of(output), lse, row_max if variant.row_max else None, plan.heads, plan.query_count, splits,
        plan.numbers.output_limit,
        VARIANT=variant, PARTS=triton.next_power_of_2(splits),
    )  # fmt: skip


def _write_probabilities(plan: Plan, probabilities: Tensor) -> None:
    arguments, tile = plan.arguments, plan.tile(tuning.REVISIT)
    launch(
        write_probabilities, plan.query_programs(tile.query_block), tile,
        *plan.inputs(tile), arguments.sinks, strides_of(arguments.sinks), arguments.seed, probabilities, *plan.sizes(),
        VARIANT=plan.variant_for(tile, surveyed=False, sinks=arguments.sinks is not None), QUERY_BLOCK=tile.query_block,
        KEY_BLOCK=tile.key_block, DROPPED=arguments.probabilities == "dropped",
    )  # fmt: skip


def _empty_lse(arguments: AttentionArguments, lse: Tensor) -> Tensor:
    if lse.numel():  # values of width zero: the rows exist, nobody looks at what they sum
        raise NotImplementedError("attention: values of width 0 have no kernel")
    return lse


def _largest(arguments: AttentionArguments, row_max: Tensor, q: Tensor) -> Tensor:
    """The largest logit of each head, [B, H] FP32, -inf where a head has no row or no key; [0] where not asked."""
    if not arguments.return_max_logits:
        return row_max
    if q.shape[2] == 0:
        return row_max.new_full(q.shape[:2], float("-inf"))
    return row_max.amax(-1)


def backward(
    gradients: Gradients, arguments: AttentionArguments, saved: Saved, collector: Collector | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """(dq, dk, dv, dbias, dsinks, [dscore_input, ...]) in the inputs' formats and shapes; [0] where not needed.

    Every sum has a fixed order: the same inputs give the same bits, but for dQ by the Hopper kernels where
    `deterministic` is off.
    """
    needs_q, needs_k, needs_v, needs_bias, needs_sinks, *needs_inputs = gradients.needs
    q, k, v = arguments.q, arguments.k, arguments.v
    nothing = q.new_empty(0)
    if saved.output.numel() == 0 or k.numel() == 0:
        return _zero_gradients(gradients, arguments)
    with torch.cuda.device_of(q):
        plan = Plan(arguments, gradients.probabilities)
        upstream = gradients.output
        if plan.variant["descriptors"] and not describable(upstream):
            upstream = heads_last(q, saved.output.shape, q.dtype).copy_(upstream)
        records = collector is not None and collector.wants("delta_bias")
        by_hopper = not records and hopper.backward_refusal(plan) is None  # it leaves no rowsum dS
        rows = RowStatistics(plan, gradients, saved, upstream, records=records, first=by_hopper)
        dk, dv, dq, dbias = nothing, nothing, nothing, nothing
        if not rows.made_by_query:
            _prepare(plan, rows)
        if by_hopper:
            dq, dk, dv = hopper.backward(launch, plan, rows, gradients.needs)
            if collector is not None:
                record(collector, rows)
            return dq, dk if needs_k else nothing, dv if needs_v else nothing, nothing, nothing, []
        if needs_q:  # first: it may make the rows' statistics on its way
            dq = heads_last(q, q.shape, q.dtype)
            _launch_query(plan, rows, dq)
        if needs_k or needs_v:
            dk, dv = heads_last(k, k.shape, k.dtype), heads_last(v, v.shape, v.dtype)
            _launch_key_value(plan, rows, dk, dv)
        if needs_bias:
            dbias = _broadcast_gradient(plan, rows, arguments.bias)
        dinputs = [
            _broadcast_gradient(plan, rows, tensor, index) if needed else tensor.new_empty(0)
            for index, (tensor, needed) in enumerate(zip(arguments.score_inputs, needs_inputs, strict=False))
        ]
        if collector is not None:
            record(collector, rows)
        dsinks = _sinks_gradient(arguments, saved, rows.delta[:, :, : plan.query_count]) if needs_sinks else nothing
    return dq, dk if needs_k else nothing, dv if needs_v else nothing, dbias, dsinks, dinputs


def _prepare(plan: Plan, rows: RowStatistics) -> None:
    arguments, saved, upstream = plan.arguments, rows.saved, rows.upstream
    tile = tuning.Tile(ROWS_AT_A_TIME, ROWS_AT_A_TIME, 4, 1)
    launch(
        prepare_rows, rows.padded_count // ROWS_AT_A_TIME * plan.batch * plan.heads, tile,
        saved.output, rows.residual, strides_of(saved.output), upstream, strides_of(upstream),
        saved.lse, rows.lse_gradient, rows.delta, rows.shift, rows.correction, rows.padded_count, rows.dead_heads,
        plan.heads, plan.query_count,
        VARIANT=plan.variant_for(tile, **rows.settings), ROWS=ROWS_AT_A_TIME, WANTS_DELTA=not rows.recompute,
    )  # fmt: skip
    if rows.recompute or rows.corrected:
        tile = plan.tile(tuning.REVISIT)
        launch(
            revisit_rows, plan.query_programs(tile.query_block), tile,
            *plan.inputs(tile), arguments.sinks, strides_of(arguments.sinks), arguments.seed,
            *plan.tiled(upstream, tile.query_block, plan.value_width), rows.lse_gradient,
            rows.delta, rows.shift, rows.correction, rows.padded_count, *plan.sizes(),
            VARIANT=plan.variant_for(tile, surveyed=False, **rows.settings, sinks=arguments.sinks is not None),
            QUERY_BLOCK=tile.query_block, KEY_BLOCK=tile.key_block, WANTS_DELTA=rows.recompute,
        )  # fmt: skip


def _launch_key_value(plan: Plan, rows: RowStatistics, dk: Tensor, dv: Tensor) -> None:
    tile = plan.tile(tuning.KEY_VALUE)
    launch(
        key_value_gradients, plan.key_programs(tile.key_block), tile,
        *plan.inputs(tile), plan.survey(launch, tile, by_key=True), plan.arguments.seed,
        *plan.tiled(rows.upstream, tile.query_block, plan.value_width), *rows.statistics(), rows.dead_heads,
        *plan.tiled(dk, tile.key_block, plan.width), *plan.tiled(dv, tile.key_block, plan.value_width), *plan.sizes(),
        VARIANT=plan.variant_for(tile), QUERY_BLOCK=tile.query_block, KEY_BLOCK=tile.key_block,
    )  # fmt: skip


def _launch_query(plan: Plan, rows: RowStatistics, dq: Tensor) -> None:
    tile = plan.tile(tuning.QUERY)
    launch(
        query_gradients, plan.query_programs(tile.query_block), tile,
        *plan.inputs(tile), plan.survey(launch, tile), plan.arguments.seed,
        *plan.tiled(rows.upstream, tile.query_block, plan.value_width), *rows.statistics(),
        *rows.recorded(), rows.saved.output, rows.residual, strides_of(rows.saved.output),
        rows.saved.lse, rows.lse_gradient,
        *plan.tiled(dq, tile.query_block, plan.width), *plan.sizes(),
        VARIANT=plan.variant_for(tile, makes_rows=rows.made_by_query, row_sums=rows.sums is not None, **rows.settings),
        QUERY_BLOCK=tile.query_block, KEY_BLOCK=tile.key_block,
    )  # fmt: skip


def _broadcast_gradient(plan: Plan, rows: RowStatistics, tensor: Tensor, score_input: int = -1) -> Tensor:
    """The gradient of the bias, or of a score input, in its shape and format."""
    tile = plan.tile(tuning.REVISIT)
    total = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    by_query, by_key = tensor.shape[2] > 1, tensor.shape[3] > 1
    own_rows = -(-plan.query_count // tile.query_block) if by_query else 1
    own_keys = -(-plan.key_count // tile.key_block) if by_key else 1
    planes, heads = tensor.shape[0] * tensor.shape[1], tensor.shape[1]
    spans = (plan.batch if tensor.shape[0] == 1 else 1, plan.heads if heads == 1 else 1)
    launch(
        bias_gradients, planes * own_rows * own_keys, tile,
        *plan.inputs(tile), plan.arguments.seed, *plan.tiled(rows.upstream, tile.query_block, plan.value_width),
        *rows.statistics(), total, *plan.sizes(), heads, *spans,
        VARIANT=plan.variant_for(tile, surveyed=False), QUERY_BLOCK=tile.query_block, KEY_BLOCK=tile.key_block,
        BY_QUERY=by_query, BY_KEY=by_key, INPUT=score_input,
    )  # fmt: skip
    return total.to(tensor.dtype)


def _sinks_gradient(arguments: AttentionArguments, saved: Saved, delta: Tensor) -> Tensor:
    """A sink holds exp(sink - lse) of each row, and its value is zero: dsink = -exp(sink - lse) * delta."""
    sinks = arguments.sinks
    share = torch.exp(sinks.to(torch.float32) - saved.lse.unsqueeze(-1))
    return share.mul_(delta.unsqueeze(-1)).neg_().sum_to_size(sinks.shape).to(sinks.dtype)


def _zero_gradients(
    gradients: Gradients, arguments: AttentionArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients where there is no row or no key: zero for whatever has elements."""
    inputs = (arguments.q, arguments.k, arguments.v, arguments.bias, arguments.sinks, *arguments.score_inputs)
    dq, dk, dv, dbias, dsinks, *dinputs = (
        torch.zeros_like(tensor) if wanted and tensor is not None else arguments.q.new_empty(0)
        for tensor, wanted in zip(inputs, gradients.needs, strict=False)
    )
    return dq, dk, dv, dbias, dsinks, dinputs
