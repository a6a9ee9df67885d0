"""One step of the Hopper forward: the softmax of a block of keys beside the products of the block before."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from precisionpass.kernels.hopper.pieces import HALF, ONES, ROWS, added, bounded, flat, multiply
from precisionpass.kernels.hopper.schedule import slot


class Memory(NamedTuple):
    """Shared memory, [places, ...] each, and the barriers that say that a place is full or free again."""

    query: object
    key: object
    value: object
    ones: object
    output: object
    residual: object
    query_full: object
    query_free: object
    key_full: object
    key_free: object
    value_full: object
    value_free: object
    tile: object
    tile_full: object
    tile_free: object


@gluon.jit
def softmax(scores, row_max, factor):
    """(P in FP32, the new maximum, what sums over earlier keys are multiplied by), scores in units of q.k."""
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max) * factor  # a row without a key so far: never inf - inf
    return gl.exp2(scores * factor - shift[:, None]), new_max, gl.exp2(row_max * factor - shift)


@gluon.jit
def scores_of(query_tile, step, memory, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """Q K^T of the step-th block, in flight."""
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_BLOCK, 16])
    nothing = gl.zeros([ROWS, KEY_BLOCK], gl.float32, layout)
    place, phase = slot(step, SCHEDULE.stages)
    keys = flat(memory.key.index(place), VARIANT.width, KEY_BLOCK).permute((1, 0))
    mbarrier.wait(memory.key_full.index(place), phase)
    return warpgroup_mma(query_tile, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def absorb(
    state, query_tile, key_start, row, factor, memory, sizes,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add P V of the block before, and make P of the block that starts at `key_start`."""
    low, high, row_sum, precise_sum, row_max, rescale, weights, step = state
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    WIDE: gl.constexpr = VARIANT.value_width > HALF
    place, _ = slot(step, SCHEDULE.stages)
    next_place, next_phase = slot(step + 1, SCHEDULE.stages)
    values = flat(memory.value.index(place), VARIANT.value_width, KEY_BLOCK)
    ones = memory.ones.permute((1, 0))
    if WIDE:
        low_part = multiply(weights, values.slice(0, HALF, dim=1), HALF)
        product = scores_of(query_tile, step + 1, memory, SCHEDULE, VARIANT)
        sum_part = multiply(weights, ones, ONES)
        low = added(low, rescale, warpgroup_mma_wait(num_outstanding=2, deps=(low_part,)))
        high_part = multiply(weights, values.slice(HALF, HALF, dim=1), HALF)
        scores, sum_part = warpgroup_mma_wait(num_outstanding=1, deps=(product, sum_part))
        row_sum = added(row_sum, rescale, sum_part)
    else:
        product = scores_of(query_tile, step + 1, memory, SCHEDULE, VARIANT)
        sum_part = multiply(weights, ones, ONES)
        low_part = multiply(weights, values, HALF)
        scores = warpgroup_mma_wait(num_outstanding=2, deps=(product,))
    mbarrier.arrive(memory.key_free.index(next_place), count=1)
    if MASKED:
        scores = bounded(scores, row, key_start, sizes, VARIANT)
    probabilities, row_max, next_rescale = softmax(scores, row_max, factor)
    if VARIANT.precise_log_sum:
        precise_sum = precise_sum * next_rescale + gl.sum(probabilities, 1)
    # Here, so that the assembler keeps the softmax before it and the wait for P V behind it.
    mbarrier.wait(memory.value_full.index(next_place), next_phase)
    if WIDE:
        high = added(high, rescale, warpgroup_mma_wait(num_outstanding=0, deps=(high_part,)))
    else:
        low_part, sum_part = warpgroup_mma_wait(num_outstanding=0, deps=(low_part, sum_part))
        low = added(low, rescale, low_part)
        row_sum = added(row_sum, rescale, sum_part)
    mbarrier.arrive(memory.value_free.index(place), count=1)
    return low, high, row_sum, precise_sum, row_max, next_rescale, probabilities.to(weights.dtype), step + 1
