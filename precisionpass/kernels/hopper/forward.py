"""The forward for Hopper: one producer warp feeds two consumer warpgroups, tensor cores run beside the softmax.

    S = scale * Q K^T      P = exp(S - m)      l = sum round(P)      O = round(P) V / l

One program makes a tile of 128 rows of one head. Its shared memory holds Q, a ring of K blocks, a ring of V blocks, a
block of ones, and the tile of O and of the residual on its way out:

    producer   (1 warp)    Q  K(n) V(n)  K(n-1) V(n-1)  K(n-2) V(n-2) ...      by the copy engine, as places get free
    consumer 0 (4 warps)   rows  0 .. 63    \\  each by itself; while one of them is in its softmax the other has the
    consumer 1 (4 warps)   rows 64 .. 127   /  tensor cores, and the second half of P V runs beside its own softmax

Blocks are taken from the last to the first: what the diagonal or the end of the keys cuts comes first, in a prologue
of its own, and the loop has no comparison. A turn of the loop, at width 128 (P, m and the sums are of block j, K and S
of the next one):

    tensor cores   | P V low  | Q K^T      | P V high          |
    CUDA cores                | low += ... |  max  exp(S) ...  | high += ...   round P

Tensor cores truncate when they add, so every product starts from zero and is added by CUDA cores (NUMERICS 4): that
takes a second set of registers, and halves of V's columns share it. A thread holds 64 numbers of S, 64 of O, 32 of a
product and 32 pairs of P: 192 of its 240 registers. At width 64 the low half is all there is.

The normaliser is a product of the rounded P with ones, [64, 8]: the same registers feed it and P V.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from precisionpass.kernels import residual as residual_code
from precisionpass.kernels.hopper.forward_step import Memory, absorb, scores_of, softmax
from precisionpass.kernels.hopper.pieces import (
    CONSUMERS,
    HALF,
    LN_2,
    LOG2_E,
    ONES,
    ROWS,
    added,
    barriers,
    bounded,
    flat,
    multiply,
)
from precisionpass.kernels.hopper.schedule import LENGTHS, Sizes, hand_out, key_blocks, slot, take, tile_count, tile_of


class Results(NamedTuple):
    """Where the results go, by descriptor and by pointer; and the scale."""

    output: object
    residual: object
    log_sum_exp: object
    maximum: object
    scale: float


@gluon.jit
def produce(query, key, value, counter, memory, sizes, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """Copy Q of each tile and its blocks of K and V into shared memory, each as soon as its place is free."""
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tile_count(sizes, SCHEDULE):
        first_row, batch, head = tile_of(tile, sizes, SCHEDULE, VARIANT)
        key_head = head // sizes.group
        first, whole_first, whole_end, last = key_blocks(first_row, sizes, SCHEDULE, VARIANT)
        for consumer in gl.static_range(CONSUMERS):
            full = memory.query_full.index(consumer)
            mbarrier.wait(memory.query_free.index(consumer), (turn & 1) ^ 1)
            mbarrier.expect(full, query.block_type.nbytes)
            tma.async_copy_global_to_shared(
                query, [batch, head, first_row + consumer * ROWS, 0], full, memory.query.index(consumer)
            )
        for back in range(last - first + 1):
            start = (last - back) * SCHEDULE.key_block
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
            step += 1
        tile = hand_out(turn, counter, memory, tile, SCHEDULE)
        turn += 1


@gluon.jit
def store_half(total, factor, dead, number, output, residual, FIRST: gl.constexpr, VARIANT: gl.constexpr):
    """Columns of O, and what rounding them dropped, into shared memory on their way out. number: of each row."""
    over: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    precise = total * gl.convert_layout(factor, over)[:, None]
    if VARIANT.dead_rows_nan:
        precise = gl.where(gl.convert_layout(dead, over)[:, None], float("nan"), precise)
    rounded = precise.to(output.dtype)
    output.slice(FIRST, HALF, dim=1).store(rounded)
    if VARIANT.residual:
        column = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, total.type.layout))
        steps = residual_code.encode(precise, rounded, gl.convert_layout(number, over)[:, None], column[None, :])
        residual.slice(FIRST, HALF, dim=1).store(steps)


@gluon.jit
def consume(
    results, memory, sizes, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr, CONSUMER: gl.constexpr
):
    """Make 64 rows of each tile: the blocks of keys from the last to the first, then O, residual and log-sum-exp."""
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    WIDE: gl.constexpr = VARIANT.value_width > HALF
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_BLOCK, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ones_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    scale = results.scale
    factor = scale * LOG2_E
    query_tile = flat(memory.query.index(CONSUMER), VARIANT.width, ROWS)
    out_tile = flat(memory.output.index(CONSUMER), VARIANT.value_width, ROWS)
    step_tile = flat(memory.residual.index(CONSUMER), VARIANT.value_width, ROWS)
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tile_count(sizes, SCHEDULE):
        first_row, batch, head = tile_of(tile, sizes, SCHEDULE, VARIANT)
        first, whole_first, whole_end, last = key_blocks(first_row, sizes, SCHEDULE, VARIANT)
        row_start = first_row + CONSUMER * ROWS
        row = row_start + gl.arange(0, ROWS, row_layout)

        place, phase = slot(step, SCHEDULE.stages)
        mbarrier.wait(memory.query_full.index(CONSUMER), turn & 1)
        product = scores_of(query_tile, step, memory, SCHEDULE, VARIANT)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(memory.key_free.index(place), count=1)
        if VARIANT.bounded:
            scores = bounded(scores, row, last * KEY_BLOCK, sizes, VARIANT)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        probabilities, row_max, rescale = softmax(scores, row_max, factor)
        precise_sum = gl.zeros([ROWS], gl.float32, row_layout)
        if VARIANT.precise_log_sum:
            precise_sum = gl.sum(probabilities, 1)
        mbarrier.wait(memory.value_full.index(place), phase)
        state = (
            gl.zeros([ROWS, HALF], gl.float32, half_layout), gl.zeros([ROWS, HALF], gl.float32, half_layout),
            gl.zeros([ROWS, ONES], gl.float32, ones_layout), precise_sum, row_max, rescale,
            probabilities.to(results.output.dtype), step,
        )  # fmt: skip
        top = last
        if SCHEDULE.crossed:
            top = gl.maximum(gl.minimum(whole_end, last), first)
            for block in range(last - 1, top - 1, -1):
                state = absorb(
                    state, query_tile, block * KEY_BLOCK, row, factor, memory, sizes, SCHEDULE, VARIANT, True
                )  # fmt: skip
        bottom = first
        if VARIANT.left_bound:
            bottom = gl.maximum(gl.minimum(whole_first, top), first)
        for _ in range(bottom, top):
            state = absorb(state, query_tile, 0, row, factor, memory, sizes, SCHEDULE, VARIANT, False)
        if VARIANT.left_bound:
            for block in range(bottom - 1, first - 1, -1):
                state = absorb(
                    state, query_tile, block * KEY_BLOCK, row, factor, memory, sizes, SCHEDULE, VARIANT, True
                )  # fmt: skip
        low, high, row_sum, precise_sum, row_max, rescale, weights, step = state

        mbarrier.arrive(memory.query_free.index(CONSUMER), count=1)
        place, phase = slot(step, SCHEDULE.stages)
        values = flat(memory.value.index(place), VARIANT.value_width, KEY_BLOCK)
        sum_part = multiply(weights, memory.ones.permute((1, 0)), ONES)
        low_part = multiply(weights, values.slice(0, HALF, dim=1), HALF)
        sum_part, low_part = warpgroup_mma_wait(num_outstanding=0, deps=(sum_part, low_part))
        row_sum = added(row_sum, rescale, sum_part)
        low = added(low, rescale, low_part)
        if WIDE:
            high_part = multiply(weights, values.slice(HALF, HALF, dim=1), HALF)
            high = added(high, rescale, warpgroup_mma_wait(num_outstanding=0, deps=(high_part,)))
        mbarrier.arrive(memory.value_free.index(place), count=1)
        step += 1

        total = gl.convert_layout(gl.max(row_sum, 1), row_layout)  # every column holds the same sum
        dead = total == 0.0
        if not VARIANT.precise_log_sum:
            precise_sum = total
        log_sum = gl.where(dead, float("-inf"), row_max * scale + gl.log2(precise_sum) * LN_2)
        statistics = (batch * sizes.heads + head).to(gl.int64) * sizes.query_count + row
        gl.store(results.log_sum_exp + statistics, log_sum, mask=row < sizes.query_count)
        if VARIANT.row_max:
            gl.store(results.maximum + statistics, row_max * scale, mask=row < sizes.query_count)
        reciprocal = 1.0 / gl.where(dead, 1.0, total)
        tma.store_wait(0)
        store_half(low, reciprocal, dead, statistics, out_tile, step_tile, 0, VARIANT)
        if WIDE:
            store_half(high, reciprocal, dead, statistics, out_tile, step_tile, HALF, VARIANT)
        fence_async_shared()
        corner = [batch, head, row_start, 0]
        tma.async_copy_shared_to_global(results.output, corner, memory.output.index(CONSUMER))
        if VARIANT.residual:
            tma.async_copy_shared_to_global(results.residual, corner, memory.residual.index(CONSUMER))
        tile = take(turn, memory, tile, SCHEDULE)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def attention_forward_hopper(
    query, key, value, output, residual, log_sum_exp, maximum, counter, scale,
    heads, group, query_count, key_count, left, right, diagonal, head_group, batch_heads,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Set the shared memory up and start the three roles."""
    STAGES: gl.constexpr = SCHEDULE.stages
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    sizes = Sizes(heads, group, query_count, key_count, left, right, diagonal, head_group, batch_heads)
    row_tile: gl.constexpr = [CONSUMERS, 1, 1, ROWS, VARIANT.width]
    out_tile: gl.constexpr = [CONSUMERS, 1, 1, ROWS, VARIANT.value_width]
    register_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    outputs = gl.allocate_shared_memory(output.dtype, out_tile, output.layout)
    steps = outputs
    if VARIANT.residual:
        steps = gl.allocate_shared_memory(residual.dtype, out_tile, residual.layout)
    memory = Memory(
        gl.allocate_shared_memory(query.dtype, row_tile, query.layout),
        gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, KEY_BLOCK, VARIANT.width], key.layout),
        gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, KEY_BLOCK, VARIANT.value_width], value.layout),
        gl.allocate_shared_memory(
            value.dtype, [ONES, KEY_BLOCK], gl.NVMMASharedLayout.get_default_for([ONES, KEY_BLOCK], value.dtype),
            gl.full([ONES, KEY_BLOCK], 1.0, value.dtype, register_layout),
        ),
        outputs, steps,
        barriers(CONSUMERS, 1), barriers(CONSUMERS, 1),
        barriers(STAGES, 1), barriers(STAGES, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, CONSUMERS),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1), barriers(2, CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    results = Results(output, residual, log_sum_exp, maximum, scale)
    gl.warp_specialize(
        [
            (produce, (query, key, value, counter, memory, sizes, SCHEDULE, VARIANT)),
            (consume, (results, memory, sizes, SCHEDULE, VARIANT, 0)),
            (consume, (results, memory, sizes, SCHEDULE, VARIANT, 1)),
        ],
        [4, 4],
        [SCHEDULE.consumer_registers, SCHEDULE.consumer_registers],
    )
