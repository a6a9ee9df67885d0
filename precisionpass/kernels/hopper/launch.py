"""From a plan to launches of the Hopper kernels: descriptors, schedules, programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from precisionpass.kernels import tuning
from precisionpass.kernels.hopper.backward import KEYS, key_value_gradients_hopper
from precisionpass.kernels.hopper.forward import attention_forward_hopper
from precisionpass.kernels.hopper.pieces import ROWS
from precisionpass.kernels.hopper.query_backward import query_gradients_hopper
from precisionpass.kernels.hopper.schedule import Schedule
from precisionpass.kernels.launch import Plan, aligned_strides, heads_last
from precisionpass.kernels.row_statistics import RowStatistics
from precisionpass.kernels.variant import Variant

Launch = Callable[..., None]
FORMATS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int8: gl.int8, torch.float32: gl.float32}
STATISTIC = gl.NVMMASharedLayout(0, 32, 1)
PART = 64  # rows and columns of dQ that are added to memory at a time
WARPS = 4
CACHE = 32 << 20  # bytes of K and V that should stay in the L2 cache between the tiles of their heads
MOST_HEADS = 16


def forward(launch: Launch, plan: Plan, output: Tensor, residual: Tensor, lse: Tensor, row_max: Tensor) -> None:
    """Fill output [B, H, Sq, Dv], lse [B, H, Sq], and residual and row_max where they have elements."""
    arguments = plan.arguments
    keeps = arguments.keeps_residual
    schedule = forward_schedule(plan)
    variant = _variant(
        plan, schedule, residual=keeps, precise_log_sum=not keeps, row_max=arguments.return_max_logits
    )
    rows, keys = ROWS.value, schedule.key_block
    launch(
        attention_forward_hopper, programs(plan, schedule), _tile(schedule),
        _descriptor(arguments.q, rows, plan.width), _descriptor(arguments.k, keys, plan.width),
        _descriptor(arguments.v, keys, plan.value_width), _descriptor(output, rows, plan.value_width),
        _descriptor(residual, rows, plan.value_width) if keeps else None, lse, row_max if variant.row_max else None,
        torch.zeros(1, dtype=torch.int32, device=lse.device) if schedule.dynamic else None,
        *_numbers(plan), SCHEDULE=schedule, VARIANT=variant,
    )  # fmt: skip


def backward(
    launch: Launch, plan: Plan, rows: RowStatistics, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the inputs' formats and shapes; [0] where not needed. `rows` have shift and delta.

    Where the attention need not be deterministic, dQ is added up in FP32 memory in one pass with dK and dV.
    """
    q, k, v = plan.arguments.q, plan.arguments.k, plan.arguments.v
    needs_q, needs_keys = needs[0], needs[1] or needs[2]
    dq = heads_last(q, q.shape, q.dtype) if needs_q else q.new_empty(0)
    dk, dv = (heads_last(part, part.shape, part.dtype) if needs_keys else q.new_empty(0) for part in (k, v))
    fused = needs_q and needs_keys and not plan.arguments.deterministic
    if needs_q and not fused:
        _query_gradients(launch, plan, rows, dq)
    if needs_keys:
        total = heads_last(q, q.shape, torch.float32).zero_() if fused else None
        _key_value_gradients(launch, plan, rows, dk, dv, total)
        if fused:
            torch.mul(total, float(plan.arguments.scale), out=dq)
    return dq, dk, dv


def _query_gradients(launch: Launch, plan: Plan, rows: RowStatistics, dq: Tensor) -> None:
    arguments, schedule = plan.arguments, query_schedule(plan)
    height, keys = ROWS.value, schedule.key_block
    tiles = triton.cdiv(plan.query_count, schedule.query_block) * plan.batch * plan.heads
    launch(
        query_gradients_hopper, tiles, _tile(schedule),
        _descriptor(arguments.q, height, plan.width), _descriptor(arguments.k, keys, plan.width),
        _descriptor(arguments.v, keys, plan.value_width), _descriptor(rows.upstream, height, plan.value_width),
        rows.shift, rows.delta, rows.padded_count, _descriptor(dq, height, plan.width), *_numbers(plan),
        SCHEDULE=schedule, VARIANT=_variant(plan, schedule),
    )  # fmt: skip


def _key_value_gradients(
    launch: Launch, plan: Plan, rows: RowStatistics, dk: Tensor, dv: Tensor, total: Tensor | None
) -> None:
    arguments, schedule = plan.arguments, key_value_schedule(plan, fused=total is not None)
    height, keys = schedule.query_block, KEYS.value
    launch(
        key_value_gradients_hopper, plan.key_programs(schedule.key_block), _tile(schedule),
        _descriptor(arguments.q, height, plan.width), _descriptor(arguments.k, keys, plan.width),
        _descriptor(arguments.v, keys, plan.value_width), _descriptor(rows.upstream, height, plan.value_width),
        _statistic(rows.shift, height), _statistic(rows.delta, height), rows.padded_count,
        _descriptor(dk, keys, plan.width), _descriptor(dv, keys, plan.value_width),
        None if total is None else _descriptor(total, PART, PART), *_numbers(plan, by_key=True),
        SCHEDULE=schedule, VARIANT=_variant(plan, schedule),
    )  # fmt: skip


def forward_schedule(plan: Plan) -> Schedule:
    """Stages by the width; tiles whose lengths differ are taken as programs get free."""
    schedule = Schedule(stages=3 if plan.widest <= tuning.NARROW else 2, dynamic=plan.right is not None)
    return replace(schedule, crossed=_crosses(plan, schedule))


def query_schedule(plan: Plan) -> Schedule:
    """Narrow heads have the registers for blocks of 128 keys."""
    narrow = plan.widest <= tuning.NARROW
    schedule = Schedule(stages=3) if narrow else Schedule(key_block=64, stages=4)
    return replace(schedule, crossed=_crosses(plan, schedule))


def key_value_schedule(plan: Plan, *, fused: bool) -> Schedule:
    """Rows at a time by the width."""
    return Schedule(query_block=128 if plan.widest <= tuning.NARROW else 64, fused=fused)


def _crosses(plan: Plan, schedule: Schedule) -> bool:
    """Whether the right bound of some tile goes through a second key block from its end."""
    if plan.right is None:
        return False
    rows, keys = schedule.query_block, schedule.key_block
    reach = plan.diagonal + plan.right + 1
    return any((first + reach) % keys + rows - 2 >= keys for first in range(0, math.lcm(rows, keys), rows))


def programs(plan: Plan, schedule: Schedule) -> int:
    """One for each multiprocessor, which takes tile after tile."""
    tiles = triton.cdiv(plan.query_count, schedule.query_block) * plan.batch * plan.heads
    return min(tiles, tuning.multiprocessors(plan.arguments.q.device))


def head_group(plan: Plan) -> int:
    """Heads whose tiles are taken side by side: as many as the L2 cache holds the keys and values of."""
    arguments = plan.arguments
    size = plan.key_count * (arguments.k.shape[3] + arguments.v.shape[3]) * arguments.k.element_size()
    return max(1, min(MOST_HEADS, CACHE // max(size, 1)))


def _numbers(plan: Plan, *, by_key: bool = False) -> tuple[float | int, ...]:
    """Scale, lengths and bounds, in the kernels' order; heads are counted of Q, or of K."""
    heads = plan.key_heads if by_key else plan.heads
    return float(plan.arguments.scale), *plan.sizes()[:-1], head_group(plan), plan.batch * heads


def _tile(schedule: Schedule) -> tuning.Tile:
    return tuning.Tile(
        schedule.query_block, schedule.key_block, WARPS, schedule.stages, registers=schedule.registers
    )


def _variant(plan: Plan, schedule: Schedule, **settings: bool) -> Variant:
    """What to compile for. The end of the rows needs no binary of its own: the copy engine and padding see to it."""
    return plan.variant_for(_tile(schedule), whole_queries=False, **settings)


def _descriptor(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of [B, H, S, W] that moves `rows` rows of one head, swizzled as the tensor cores read them."""
    layout = _layout(rows, width, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), aligned_strides(tensor), [1, 1, rows, width], layout)


@lru_cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], FORMATS[dtype])


def _statistic(tensor: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of the FP32 numbers of all rows, one after the other, that moves those of `rows` rows."""
    return TensorDescriptor(tensor, [tensor.numel()], [1], [rows], STATISTIC)
