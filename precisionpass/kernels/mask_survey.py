"""What a boolean mask holds, block by block, found before the attention starts.

Blocks that allow nothing are left out at both ends of a row of blocks; blocks that allow everything skip the mask.
"""

import triton
import triton.language as tl

NOTHING, MIXED, EVERYTHING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
HEADER = tl.constexpr(2)  # first and end of the blocks that hold something, then the kind of each, then one to spare
AT_A_TIME = 1 << 14  # bytes of the mask: 64 a thread


@triton.jit
def extremes(mask, strides, outer, inner, BY_KEY: tl.constexpr):
    """The largest and the smallest byte of the mask over `outer`, for each of `inner`."""
    if BY_KEY:
        place = inner[:, None].to(tl.int64) * strides.row + outer[None, :] * strides.column
        tile = tl.load(mask + place)
        largest, smallest = tl.max(tile, 1), tl.min(tile, 1)
    else:
        place = outer[:, None].to(tl.int64) * strides.row + inner[None, :] * strides.column
        tile = tl.load(mask + place)
        largest, smallest = tl.max(tile, 0), tl.min(tile, 0)
    return largest, smallest


@triton.jit(do_not_specialize=["query_count", "key_count"])
def mask_survey(
    mask, mask_strides, found, query_count, key_count,
    OUTER: tl.constexpr, INNER: tl.constexpr, COUNT: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """One program: a row of blocks, OUTER queries by all keys of a plane, or with BY_KEY OUTER keys by all queries."""
    outer_count = key_count if BY_KEY else query_count
    inner_count = query_count if BY_KEY else key_count
    outer_blocks = tl.cdiv(outer_count, OUTER)
    inner_blocks = tl.cdiv(inner_count, INNER)
    plane = tl.program_id(0) // outer_blocks
    block = tl.program_id(0) % outer_blocks
    mask += plane.to(tl.int64) * mask_strides.batch
    target = found + tl.program_id(0).to(tl.int64) * (HEADER + inner_blocks + 1)
    outer = block * OUTER + tl.arange(0, OUTER)
    first = inner_blocks
    end = 0
    for start in range(0, inner_blocks, COUNT):
        inner = start * INNER + tl.arange(0, COUNT * INNER)
        if ((start + COUNT) * INNER <= inner_count) & ((block + 1) * OUTER <= outer_count):
            largest, smallest = extremes(mask, mask_strides, outer, inner, BY_KEY)
        else:  # the last row or key stands for those past the end
            outer_inside, inner_inside = tl.minimum(outer, outer_count - 1), tl.minimum(inner, inner_count - 1)
            largest, smallest = extremes(mask, mask_strides, outer_inside, inner_inside, BY_KEY)
        largest = tl.max(tl.reshape(largest, [COUNT, INNER]), 1)
        smallest = tl.min(tl.reshape(smallest, [COUNT, INNER]), 1)
        kind = (largest != 0).to(tl.int32) + (smallest != 0).to(tl.int32)
        index = start + tl.arange(0, COUNT)
        tl.store(target + HEADER + index, kind, mask=index < inner_blocks)
        holds = (largest != 0) & (index < inner_blocks)
        first = tl.minimum(first, tl.min(tl.where(holds, index, inner_blocks), 0))
        end = tl.maximum(end, tl.max(tl.where(holds, index + 1, 0), 0))
    tl.store(target, first)
    tl.store(target + 1, end)


@triton.jit
def narrowed(survey, mask_strides, batch, block, outer_blocks, inner_count, start, end, INNER: tl.constexpr):
    """(the survey of one row of blocks, start, end), without what stands before its first block and behind its last."""
    plane = tl.where(mask_strides.batch == 0, 0, batch)
    row = (plane * outer_blocks + block).to(tl.int64) * (HEADER + tl.cdiv(inner_count, INNER) + 1)
    found = survey + row
    return found, tl.maximum(start, tl.load(found) * INNER), tl.minimum(end, tl.load(found + 1) * INNER)


@triton.jit
def kind_of(survey, block, VARIANT: tl.constexpr):
    """The kind of a block; of one past either end something, so that a loop may ask one block ahead."""
    kind = MIXED
    if VARIANT.surveyed:
        kind = tl.load(survey + HEADER + block)
    return kind
