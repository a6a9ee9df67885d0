"""How the work is cut: which tile a program takes next, which key blocks it needs, where a block stands in a ring."""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TILE_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@dataclass(frozen=True)
class Schedule:
    """What a binary is compiled for beside its `Variant`.

    stages:      blocks that are in shared memory at once: of K and of V; in the backward of Q and of dO.
    crossed:     a second key block from the end may cross the right bound (the diagonal stands across two blocks).
    dynamic:     programs take the next tile as they get free, by a counter in memory; else they are dealt in turn.
    fused:       the backward adds dQ to memory while it makes dK and dV.
    consumer_registers, registers: of a thread that computes, and of all at the start.
    """

    query_block: int = 128
    key_block: int = 128
    stages: int = 2
    crossed: bool = False
    dynamic: bool = False
    fused: bool = False
    consumer_registers: int = 240
    registers: int = 168


class Sizes(NamedTuple):
    """Run-time numbers of an attention; the kernels take each as an argument of that name.

    head_group: heads whose tiles are taken side by side, so that their K and V stay in the L2 cache.
    """

    heads: int
    group: int
    query_count: int
    key_count: int
    left: int
    right: int
    diagonal: int
    head_group: int
    batch_heads: int


LENGTHS = list(Sizes._fields)
"""Arguments of the kernels for which no binary of its own is made."""


@gluon.jit
def tile_count(sizes, SCHEDULE: gl.constexpr):
    """Tiles of all heads."""
    return gl.cdiv(sizes.query_count, SCHEDULE.query_block) * sizes.batch_heads


@gluon.jit
def tile_of(tile, sizes, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """(first row, batch, head) of a tile; neighbours are the same rows of neighbouring heads, the long ones first."""
    blocks = gl.cdiv(sizes.query_count, SCHEDULE.query_block)
    first_head = tile // (sizes.head_group * blocks) * sizes.head_group
    members = gl.minimum(sizes.head_group, sizes.batch_heads - first_head)
    within = tile - first_head * blocks
    block = within // members
    if VARIANT.right_bound:
        block = blocks - 1 - block
    batch_head = first_head + within % members
    return block * SCHEDULE.query_block, batch_head // sizes.heads, batch_head % sizes.heads


@gluon.jit
def hand_out(turn, counter, memory, tile, SCHEDULE: gl.constexpr):
    """The program's next tile, for its producer, who tells the consumers.

    Tiles of one length are dealt in turn; of tiles that differ each program takes the next as it gets free.
    """
    if SCHEDULE.dynamic:
        tile = gl.num_programs(0) + gl.atomic_add(counter, 1)
        place, phase = slot(turn, 2)
        mbarrier.wait(memory.tile_free.index(place), phase ^ 1)
        memory.tile.index(place).store(gl.full([1], tile, gl.int32, TILE_LAYOUT))
        mbarrier.arrive(memory.tile_full.index(place), count=1)
    else:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def take(turn, memory, tile, SCHEDULE: gl.constexpr):
    """The program's next tile, for a consumer."""
    if SCHEDULE.dynamic:
        place, phase = slot(turn, 2)
        mbarrier.wait(memory.tile_full.index(place), phase)
        tile = gl.max(memory.tile.index(place).load(TILE_LAYOUT), 0)
        mbarrier.arrive(memory.tile_free.index(place), count=1)
    else:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def key_blocks(first_row, sizes, SCHEDULE: gl.constexpr, VARIANT: gl.constexpr):
    """(first, whole_first, whole_end, last): a tile's key blocks, taken from `last` down to `first`.

    [whole_first, whole_end) need no comparison. There is at least one block, if only to find that a row has no key.
    """
    KEY_BLOCK: gl.constexpr = SCHEDULE.key_block
    QUERY_BLOCK: gl.constexpr = SCHEDULE.query_block
    end = sizes.key_count
    first = 0
    whole_first = 0
    whole_end = sizes.key_count // KEY_BLOCK
    if VARIANT.right_bound:
        reach = first_row + sizes.diagonal + sizes.right + 1  # past the last key of the first row
        end = gl.maximum(gl.minimum(end, reach + QUERY_BLOCK - 1), 1)
        whole_end = gl.minimum(whole_end, gl.maximum(reach, 0) // KEY_BLOCK)
    last = (end - 1) // KEY_BLOCK
    if VARIANT.left_bound:
        start = first_row + sizes.diagonal - sizes.left  # the first key of the first row
        first = gl.minimum(gl.maximum(start, 0) // KEY_BLOCK, last)
        whole_first = gl.cdiv(gl.maximum(start + QUERY_BLOCK - 1, 0), KEY_BLOCK)
    return first, whole_first, whole_end, last


@gluon.jit
def slot(step, STAGES: gl.constexpr):
    """(place in a ring, phase of its barrier) of the step-th block that passes through it."""
    return step % STAGES, (step // STAGES) & 1
