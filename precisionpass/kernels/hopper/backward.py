"""dK and dV for Hopper by key blocks, and in the same pass dQ, where nobody asks that its bits repeat.

    P^T = exp(scale * K Q^T - lse)      dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV  = P^T dO      dK = scale * dS^T Q      dQ = scale * dS K

A program keeps K and V of 128 keys in shared memory, and Q, dO, lse and delta of block after block of rows pass by:

    producer   (4 warps)   K V  Q(0) dO(0)  Q(1) dO(1)  Q(2) dO(2) ...         by the copy engine, as places get free
    consumer 0 (4 warps)   keys  0 .. 63    \\  scores are transposed, so that P^T and dS^T go from registers into the
    consumer 1 (4 warps)   keys 64 .. 127   /  tensor cores as they are; each holds dK and dV of its keys

    tensor cores   | K Q^T | V dO^T |        | P^T dO          | dS K | dS^T Q     |
    CUDA cores             | exp -> P^T      | dS^T            |      | dQ to memory

With `fused` both consumers leave dS^T in shared memory and each makes half of dQ of these rows over all 128 keys, which
the copy engine adds to FP32 memory: the order of these additions, and so the last bits of dQ, change from run to run.
dK and dV do not.
"""

from typing import NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from precisionpass.kernels import masks
from precisionpass.kernels.hopper.pieces import LOG2_E, barriers, flat
from precisionpass.kernels.hopper.schedule import LENGTHS, Sizes, slot

KEYS = gl.constexpr(64)  # of a consumer


class Memory(NamedTuple):
    """Shared memory, [places, ...] each, and the barriers that say that a place is full or free again."""

    key: object
    value: object
    query: object
    gradient: object
    shift: object
    delta: object
    slope: object
    part: object
    loaded: object
    query_full: object
    query_free: object
    gradient_full: object
    gradient_free: object
    slope_full: object


@builtin
def add_to_global(descriptor, place, source, _semantic=None):
    """Add a tile of shared memory to global memory by the copy engine; asynchronous, as a store by it is."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, source.handle)


@gluon.jit
def key_tile_of(sizes, SCHEDULE: gl.constexpr):
    """(first key, batch, key head) of the program; neighbours take the same block of neighbouring heads."""
    blocks = gl.cdiv(sizes.key_count, 2 * KEYS)
    first_head = gl.program_id(0) // (sizes.head_group * blocks) * sizes.head_group
    members = gl.minimum(sizes.head_group, sizes.batch_heads - first_head)
    within = gl.program_id(0) - first_head * blocks
    batch_head = first_head + within % members
    key_heads = sizes.heads // sizes.group
    return within // members * (2 * KEYS), batch_head // key_heads, batch_head % key_heads


@gluon.jit
def rows_of(key_start, sizes, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """(start, whole_start, whole_end, end) of rows for the program's keys; see `masks.query_range`."""
    QUERY_BLOCK: gl.constexpr = SCHEDULE.query_block
    return masks.query_range(
        key_start, sizes.query_count, sizes.left, sizes.right, sizes.diagonal, QUERY_BLOCK, 128, VARIANT
    )


@gluon.jit
def produce(
    query, key, value, gradient, shift, delta, padded_count, memory, sizes,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Copy K and V once, then Q, dO and the statistics of each block of rows as soon as their places are free."""
    QUERY_BLOCK: gl.constexpr = SCHEDULE.query_block
    key_start, batch, key_head = key_tile_of(sizes, SCHEDULE)
    mbarrier.expect(memory.loaded.index(0), 2 * key.block_type.nbytes + 2 * value.block_type.nbytes)
    for half in gl.static_range(2):
        corner = [batch, key_head, key_start + half * KEYS, 0]
        tma.async_copy_global_to_shared(key, corner, memory.loaded.index(0), memory.key.index(half))
        tma.async_copy_global_to_shared(value, corner, memory.loaded.index(0), memory.value.index(half))
    start, whole_start, whole_end, end = rows_of(key_start, sizes, SCHEDULE, VARIANT)
    step = 0
    for member in range(sizes.group):
        head = key_head * sizes.group + member
        statistics = (batch * sizes.heads + head) * padded_count
        for query_start in range(start, end, QUERY_BLOCK):
            place, phase = slot(step, SCHEDULE.stages)
            full = memory.query_full.index(place)
            mbarrier.wait(memory.query_free.index(place), phase ^ 1)
            mbarrier.expect(full, query.block_type.nbytes + shift.block_type.nbytes)
            tma.async_copy_global_to_shared(query, [batch, head, query_start, 0], full, memory.query.index(place))
            tma.async_copy_global_to_shared(shift, [statistics + query_start], full, memory.shift.index(place))
            full = memory.gradient_full.index(place)
            mbarrier.wait(memory.gradient_free.index(place), phase ^ 1)
            mbarrier.expect(full, gradient.block_type.nbytes + delta.block_type.nbytes)
            tma.async_copy_global_to_shared(gradient, [batch, head, query_start, 0], full, memory.gradient.index(place))
            tma.async_copy_global_to_shared(delta, [statistics + query_start], full, memory.delta.index(place))
            step += 1


@gluon.jit
def query_part(memory, buffer, CONSUMER: gl.constexpr, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """A consumer's share of dS K, [64, 64]: half of the columns of 64 rows, or half of 128 rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    part = gl.zeros([64, 64], gl.float32, layout)
    for half in gl.static_range(2):
        slope = memory.slope.index(buffer * 2 + half)
        keys = flat(memory.key.index(half), VARIANT.width, KEYS)
        if SCHEDULE.query_block == 64:
            keys = keys.slice(CONSUMER * 64, 64, dim=1)
        else:
            slope = slope.slice(CONSUMER * 64, 64, dim=1)
        part = warpgroup_mma(slope.permute((1, 0)), keys, part, use_acc=half > 0, is_async=True)
    return part


@gluon.jit
def gather(
    key_sum, value_sum, step, query_start, key, batch, head, factor, query_gradient, memory, sizes,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr, CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add what a block of rows gives to dK and dV of a consumer's keys, and with `fused` its share of dQ to memory."""
    ROWS: gl.constexpr = SCHEDULE.query_block
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    key_operand: gl.constexpr = gl.DotOperandLayout(0, key_sum.type.layout, 2)
    value_operand: gl.constexpr = gl.DotOperandLayout(0, value_sum.type.layout, 2)
    place, phase = slot(step, SCHEDULE.stages)
    query_tile = flat(memory.query.index(place), VARIANT.width, ROWS)
    gradient_tile = flat(memory.gradient.index(place), VARIANT.value_width, ROWS)
    key_tile = flat(memory.key.index(CONSUMER), VARIANT.width, KEYS)
    value_tile = flat(memory.value.index(CONSUMER), VARIANT.value_width, KEYS)
    nothing = gl.zeros([KEYS, ROWS], gl.float32, score_layout)

    mbarrier.wait(memory.query_full.index(place), phase)
    product = warpgroup_mma(key_tile, query_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(memory.gradient_full.index(place), phase)
    change = warpgroup_mma(value_tile, gradient_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    shift = memory.shift.index(place).load(row_layout)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
    weights = gl.exp2(scores * factor - shift[None, :])
    row = query_start + gl.arange(0, ROWS, row_layout)
    if MASKED and VARIANT.right_bound:
        weights = gl.where(key[:, None] <= (row + (sizes.diagonal + sizes.right))[None, :], weights, 0.0)
    if MASKED and VARIANT.left_bound:
        weights = gl.where(key[:, None] >= (row + (sizes.diagonal - sizes.left))[None, :], weights, 0.0)
    if SCHEDULE.fused and not VARIANT.whole_keys:
        weights = gl.where((key < sizes.key_count)[:, None], weights, 0.0)
    rounded = weights.to(query_tile.dtype)
    delta = memory.delta.index(place).load(row_layout)
    change = warpgroup_mma_wait(num_outstanding=0, deps=(change,))
    value_sum = warpgroup_mma(gl.convert_layout(rounded, value_operand), gradient_tile, value_sum, is_async=True)
    slope = (weights * (change - delta[None, :])).to(query_tile.dtype)
    if SCHEDULE.fused:
        buffer = step & 1
        memory.slope.index(buffer * 2 + CONSUMER).store(slope)
        fence_async_shared()
        mbarrier.arrive(memory.slope_full.index(buffer), count=1)
        mbarrier.wait(memory.slope_full.index(buffer), (step >> 1) & 1)
        part = query_part(memory, buffer, CONSUMER, SCHEDULE, VARIANT)
        key_sum = warpgroup_mma(gl.convert_layout(slope, key_operand), query_tile, key_sum, is_async=True)
        value_sum, part = warpgroup_mma_wait(num_outstanding=1, deps=(value_sum, part))
        mbarrier.arrive(memory.gradient_free.index(place), count=1)
        tma.store_wait(0)
        leaving = memory.part.index(CONSUMER)
        flat(leaving, 64, 64).store(part)
        fence_async_shared()
        if ROWS == 64:
            add_to_global(query_gradient, [batch, head, query_start, CONSUMER * 64], leaving)
        else:
            add_to_global(query_gradient, [batch, head, query_start + CONSUMER * 64, 0], leaving)
    else:
        key_sum = warpgroup_mma(gl.convert_layout(slope, key_operand), query_tile, key_sum, is_async=True)
        value_sum = warpgroup_mma_wait(num_outstanding=1, deps=(value_sum,))
        mbarrier.arrive(memory.gradient_free.index(place), count=1)
    key_sum = warpgroup_mma_wait(num_outstanding=0, deps=(key_sum,))
    mbarrier.arrive(memory.query_free.index(place), count=1)
    return key_sum, value_sum, step + 1


@gluon.jit
def consume(
    key_gradient, value_gradient, query_gradient, scale, memory, sizes,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys over the rows of all query heads that share them, in their order."""
    QUERY_BLOCK: gl.constexpr = SCHEDULE.query_block
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERY_BLOCK, 16])
    WIDTH: gl.constexpr = VARIANT.width
    VALUE_WIDTH: gl.constexpr = VARIANT.value_width
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_WIDTH, 16])
    key_start, batch, key_head = key_tile_of(sizes, SCHEDULE)
    key = key_start + CONSUMER * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, score_layout))
    key_sum = gl.zeros([KEYS, WIDTH], gl.float32, key_layout)
    value_sum = gl.zeros([KEYS, VALUE_WIDTH], gl.float32, value_layout)
    start, whole_start, whole_end, end = rows_of(key_start, sizes, SCHEDULE, VARIANT)
    factor = scale * LOG2_E
    step = 0
    mbarrier.wait(memory.loaded.index(0), 0)
    for member in range(sizes.group):
        head = key_head * sizes.group + member
        if VARIANT.right_bound:
            for query_start in range(start, whole_start, QUERY_BLOCK):
                key_sum, value_sum, step = gather(
                    key_sum, value_sum, step, query_start, key, batch, head, factor, query_gradient, memory, sizes,
                    SCHEDULE, VARIANT, CONSUMER, True,
                )  # fmt: skip
        for query_start in range(whole_start, whole_end, QUERY_BLOCK):
            key_sum, value_sum, step = gather(
                key_sum, value_sum, step, query_start, key, batch, head, factor, query_gradient, memory, sizes,
                SCHEDULE, VARIANT, CONSUMER, False,
            )  # fmt: skip
        if VARIANT.left_bound:
            for query_start in range(whole_end, end, QUERY_BLOCK):
                key_sum, value_sum, step = gather(
                    key_sum, value_sum, step, query_start, key, batch, head, factor, query_gradient, memory, sizes,
                    SCHEDULE, VARIANT, CONSUMER, True,
                )  # fmt: skip
    corner = [batch, key_head, key_start + CONSUMER * KEYS, 0]
    if SCHEDULE.fused:
        # The other consumer may still read this one's keys for its share of dQ.
        mbarrier.arrive(memory.slope_full.index(step & 1), count=1)
        mbarrier.wait(memory.slope_full.index(step & 1), (step >> 1) & 1)
    flat(memory.key.index(CONSUMER), VARIANT.width, KEYS).store((key_sum * scale).to(key_gradient.dtype))
    flat(memory.value.index(CONSUMER), VARIANT.value_width, KEYS).store(value_sum.to(value_gradient.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(key_gradient, corner, memory.key.index(CONSUMER))
    tma.async_copy_shared_to_global(value_gradient, corner, memory.value.index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def key_value_gradients_hopper(
    query, key, value, gradient, shift, delta, padded_count, key_gradient, value_gradient, query_gradient, scale,
    heads, group, query_count, key_count, left, right, diagonal, head_group, batch_heads,
    SCHEDULE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Set the shared memory up and start the three roles. `query_gradient`: FP32, zero, with `fused`; else None."""
    STAGES: gl.constexpr = SCHEDULE.stages
    ROWS: gl.constexpr = SCHEDULE.query_block
    sizes = Sizes(heads, group, query_count, key_count, left, right, diagonal, head_group, batch_heads)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], shift.layout)
    slopes = shifts
    part = shifts
    if SCHEDULE.fused:
        slope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], query.dtype)
        slopes = gl.allocate_shared_memory(query.dtype, [4, KEYS, ROWS], slope_layout)
        part = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], query_gradient.layout)
    memory = Memory(
        gl.allocate_shared_memory(key.dtype, [2, 1, 1, KEYS, VARIANT.width], key.layout),
        gl.allocate_shared_memory(value.dtype, [2, 1, 1, KEYS, VARIANT.value_width], value.layout),
        gl.allocate_shared_memory(query.dtype, [STAGES, 1, 1, ROWS, VARIANT.width], query.layout),
        gl.allocate_shared_memory(gradient.dtype, [STAGES, 1, 1, ROWS, VARIANT.value_width], gradient.layout),
        shifts,
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta.layout),
        slopes, part,
        barriers(1, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2),
        barriers(2, 2),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (produce, (query, key, value, gradient, shift, delta, padded_count, memory, sizes, SCHEDULE, VARIANT)),
            (consume, (key_gradient, value_gradient, query_gradient, scale, memory, sizes, SCHEDULE, VARIANT, 0)),
            (consume, (key_gradient, value_gradient, query_gradient, scale, memory, sizes, SCHEDULE, VARIANT, 1)),
        ],
        [4, 4],
        [SCHEDULE.consumer_registers, SCHEDULE.consumer_registers],
    )
