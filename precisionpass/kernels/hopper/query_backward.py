"""dQ for Hopper by blocks of rows, without a sum in memory, so that every bit repeats.

    P = exp(scale * Q K^T - lse)      dP = dO V^T      dS = P * (dP - delta)      dQ = scale * dS K

The roles are those of the forward: Q and dO of 128 rows stay in shared memory, blocks of K and V pass by, two consumer
warpgroups hold dQ of 64 rows each. dS K of a block runs while the next block's products and softmax do:

    tensor cores   | Q K^T      | dO V^T     | dS K of the block before |
    CUDA cores                  | exp        | dS = P * (dP - delta)    |
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from precisionpass.kernels.hopper.pieces import CONSUMERS, LOG2_E, ROWS, barriers, bounded, flat
from precisionpass.kernels.hopper.schedule import LENGTHS, Sizes, key_blocks, slot, tile_of


class Memory(NamedTuple):
    """Shared memory, [places, ...] each, and the barriers that say that a place is full or free again."""

    query: object
    gradient: object
    key: object
    value: object
    loaded: object
    key_full: object
    key_free: object
    value_full: object
    value_free: object


@gluon.jit
def produce(query, gradient, key, value, memory, sizes, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """Copy Q and dO once, then blocks of K and V as soon as their places are free."""
    first_row, batch, head = tile_of(gl.program_id(0), sizes, SCHEDULE, VARIANT)
    key_head = head // sizes.group
    first, whole_first, whole_end, last = key_blocks(first_row, sizes, SCHEDULE, VARIANT)
    for consumer in gl.static_range(CONSUMERS):
        loaded = memory.loaded.index(consumer)
        corner = [batch, head, first_row + consumer * ROWS, 0]
        mbarrier.expect(loaded, query.block_type.nbytes + gradient.block_type.nbytes)
        tma.async_copy_global_to_shared(query, corner, loaded, memory.query.index(consumer))
        tma.async_copy_global_to_shared(gradient, corner, loaded, memory.gradient.index(consumer))
    for step in range(last - first + 1):
        start = (last - step) * SCHEDULE.key_block
        place, phase = slot(step, SCHEDULE.stages)
        mbarrier.wait(memory.key_free.index(place), phase ^ 1)
        mbarrier.expect(memory.key_full.index(place), key.block_type.nbytes)
        tma.async_copy_global_to_shared(
            key, [batch, key_head, start, 0], memory.key_full.index(place), memory.key.index(place)
        )
        mbarrier.wait(memory.value_free.index(place), phase ^ 1)
        mbarrier.expect(memory.value_full.index(place), value.block_type.nbytes)
        tma.async_copy_global_to_shared(
            value, [batch, key_head, start, 0], memory.value_full.index(place), memory.value.index(place)
        )


@gluon.jit
def products(query_tile, gradient_tile, step, memory, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """Q K^T and dO V^T of the step-th block, in flight."""
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_BLOCK, 16])
    nothing = gl.zeros([ROWS, KEY_BLOCK], gl.float32, layout)
    place, phase = slot(step, SCHEDULE.stages)
    keys = flat(memory.key.index(place), VARIANT.width, KEY_BLOCK).permute((1, 0))
    values = flat(memory.value.index(place), VARIANT.value_width, KEY_BLOCK).permute((1, 0))
    mbarrier.wait(memory.key_full.index(place), phase)
    product = warpgroup_mma(query_tile, keys, nothing, use_acc=False, is_async=True)
    mbarrier.wait(memory.value_full.index(place), phase)
    return product, warpgroup_mma(gradient_tile, values, nothing, use_acc=False, is_async=True)


@gluon.jit
def probabilities(scores, shift, row, key_start, factor, sizes, VARIANT: gl.constexpr, MASKED: gl.constexpr):
    """P of a tile, 0 where the bounds exclude a key."""
    if MASKED:
        scores = bounded(scores, row, key_start, sizes, VARIANT)
    return gl.exp2(scores * factor - shift[:, None])


@gluon.jit
def absorb(
    query_sum, slope, step, query_tile, gradient_tile, shift, delta, row, key_start, factor, memory, sizes,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add dS K of the block before, and make dS of the block that starts at `key_start`."""
    place, _ = slot(step, SCHEDULE.stages)
    next_place, _ = slot(step + 1, SCHEDULE.stages)
    operand: gl.constexpr = gl.DotOperandLayout(0, query_sum.type.layout, 2)
    keys = flat(memory.key.index(place), VARIANT.width, SCHEDULE.key_block)
    product, change = products(query_tile, gradient_tile, step + 1, memory, SCHEDULE, VARIANT)
    query_sum = warpgroup_mma(gl.convert_layout(slope, operand), keys, query_sum, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=2, deps=(product,))
    weights = probabilities(scores, shift, row, key_start, factor, sizes, VARIANT, MASKED)
    change = warpgroup_mma_wait(num_outstanding=1, deps=(change,))
    mbarrier.arrive(memory.value_free.index(next_place), count=1)
    next_slope = weights * (change - delta[:, None])
    query_sum = warpgroup_mma_wait(num_outstanding=0, deps=(query_sum,))
    mbarrier.arrive(memory.key_free.index(place), count=1)
    return query_sum, next_slope.to(slope.dtype), step + 1


@gluon.jit
def consume(
    query_gradient, shift, delta, padded_count, scale, memory, sizes,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dQ of 64 rows, over their keys from the last block to the first."""
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    WIDTH: gl.constexpr = VARIANT.width
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_BLOCK, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    factor = scale * LOG2_E
    first_row, batch, head = tile_of(gl.program_id(0), sizes, SCHEDULE, VARIANT)
    first, whole_first, whole_end, last = key_blocks(first_row, sizes, SCHEDULE, VARIANT)
    row = first_row + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    statistics = (batch * sizes.heads + head).to(gl.int64) * padded_count + row
    row_shift = gl.load(shift + statistics)
    row_delta = gl.load(delta + statistics)
    query_tile = flat(memory.query.index(CONSUMER), WIDTH, ROWS)
    gradient_tile = flat(memory.gradient.index(CONSUMER), VARIANT.value_width, ROWS)

    mbarrier.wait(memory.loaded.index(CONSUMER), 0)
    product, change = products(query_tile, gradient_tile, 0, memory, SCHEDULE, VARIANT)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
    weights = probabilities(
        scores, row_shift, row, last * KEY_BLOCK, factor, sizes, VARIANT, VARIANT.bounded
    )  # fmt: skip
    change = warpgroup_mma_wait(num_outstanding=0, deps=(change,))
    mbarrier.arrive(memory.value_free.index(0), count=1)
    slope = (weights * (change - row_delta[:, None])).to(query_gradient.dtype)
    query_sum = gl.zeros([ROWS, WIDTH], gl.float32, sum_layout)
    step = 0
    top = last
    if SCHEDULE.crossed:
        top = gl.maximum(gl.minimum(whole_end, last), first)
        for block in range(last - 1, top - 1, -1):
            query_sum, slope, step = absorb(
                query_sum, slope, step, query_tile, gradient_tile, row_shift, row_delta, row,
                block * KEY_BLOCK, factor, memory, sizes, SCHEDULE, VARIANT, True,
            )  # fmt: skip
    bottom = first
    if VARIANT.left_bound:
        bottom = gl.maximum(gl.minimum(whole_first, top), first)
    for _ in range(bottom, top):
        query_sum, slope, step = absorb(
            query_sum, slope, step, query_tile, gradient_tile, row_shift, row_delta, row, 0,
            factor, memory, sizes, SCHEDULE, VARIANT, False,
        )  # fmt: skip
    if VARIANT.left_bound:
        for block in range(bottom - 1, first - 1, -1):
            query_sum, slope, step = absorb(
                query_sum, slope, step, query_tile, gradient_tile, row_shift, row_delta, row,
                block * KEY_BLOCK, factor, memory, sizes, SCHEDULE, VARIANT, True,
            )  # fmt: skip

    place, _ = slot(step, SCHEDULE.stages)
    keys = flat(memory.key.index(place), WIDTH, KEY_BLOCK)
    query_sum = warpgroup_mma(gl.convert_layout(slope, gl.DotOperandLayout(0, sum_layout, 2)), keys, query_sum)
    query_tile.store((query_sum * scale).to(query_gradient.dtype))
    fence_async_shared()
    corner = [batch, head, first_row + CONSUMER * ROWS, 0]
    tma.async_copy_shared_to_global(query_gradient, corner, memory.query.index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def query_gradients_hopper(
    query, key, value, gradient, shift, delta, padded_count, query_gradient, scale,
    heads, group, query_count, key_count, left, right, diagonal, head_group, batch_heads,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Set the shared memory up and start the three roles."""
    STAGES: gl.constexpr = SCHEDULE.stages
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    sizes = Sizes(heads, group, query_count, key_count, left, right, diagonal, head_group, batch_heads)
    memory = Memory(
        gl.allocate_shared_memory(query.dtype, [CONSUMERS, 1, 1, ROWS, VARIANT.width], query.layout),
        gl.allocate_shared_memory(gradient.dtype, [CONSUMERS, 1, 1, ROWS, VARIANT.value_width], gradient.layout),
        gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, KEY_BLOCK, VARIANT.width], key.layout),
        gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, KEY_BLOCK, VARIANT.value_width], value.layout),
        barriers(CONSUMERS, 1),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (produce, (query, gradient, key, value, memory, sizes, SCHEDULE, VARIANT)),
            (
                consume,
                (query_gradient, shift, delta, padded_count, scale, memory, sizes, SCHEDULE, VARIANT, 0),
            ),
            (
                consume,
                (query_gradient, shift, delta, padded_count, scale, memory, sizes, SCHEDULE, VARIANT, 1),
            ),
        ],
        [4, 4],
        [SCHEDULE.consumer_registers, SCHEDULE.consumer_registers],
    )
