"""What a boolean mask holds, found before the attention starts: one bit for each place, and a kind for each block.

Blocks that allow nothing are left out at both ends of a row of blocks; blocks that allow everything skip the mask.
Of the rest a program reads its row's bits, 64 of them in a word: an eighth of the mask's bytes, and in registers they
need no layout of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionpass.kernels.tuning import Tile
from precisionpass.kernels.variant import Strides

NOTHING, MIXED, EVERYTHING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
HEADER = tl.constexpr(2)  # first and end of the blocks that hold something, then the kind of each, then one to spare
AT_A_TIME = 1 << 14  # bytes of the mask: 64 a thread
AT_A_TIME_BY_KEY = 1 << 15  # 4 a thread, 32 times
WORD = 64  # bits


def survey(
    launch: Callable[..., None], mask: Tensor, strides: Strides, lengths: tuple[int, int], tile: tuple[int, int],
    *, by_key: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(kinds, words) of a mask [B or 1, 1, rows, keys] of bytes, for tiles of rows and keys; by_key: keys are its rows.

    kinds INT32 [planes, blocks of rows, 3 + blocks of keys]. words INT64 [planes, words of a row, rows], whole blocks
    and one to spare: an eighth of the bytes of the mask, for as long as the kernel runs.
    """
    sizes = zip(lengths, tile, strict=True)
    (outer_count, outer), (inner_count, inner) = reversed(tuple(sizes)) if by_key else sizes
    planes, outer_blocks, inner_blocks = mask.shape[0], triton.cdiv(outer_count, outer), triton.cdiv(inner_count, inner)
    bits = min(inner, WORD)  # a block never ends inside a word
    count = (planes * inner_blocks + 1) * (inner // bits) * outer_blocks * outer
    kinds = torch.empty((planes, outer_blocks, 3 + inner_blocks), dtype=torch.int32, device=mask.device)
    words = torch.empty(count, dtype=torch.int64, device=mask.device)
    at_a_time = AT_A_TIME_BY_KEY if by_key else AT_A_TIME
    launch(
        mask_survey, planes * outer_blocks, Tile(outer, inner, 8, 1), mask, strides, kinds, words, *lengths,
        OUTER=outer, INNER=inner, COUNT=max(at_a_time // (outer * inner), 1), BITS=bits, BY_KEY=by_key,
    )  # fmt: skip
    return kinds, words


@triton.jit
def packed(
    mask, strides, outer, start, inner_count, SPAN: tl.constexpr, BITS: tl.constexpr, BY_KEY: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """The mask at `outer` and SPAN places from `start` on, as words [outer, SPAN / BITS], made of halves of 32 bits.

    With BY_KEY a word gathers a bit of each of BITS rows: a row at a time, so that no two threads make one word. CHECK:
    places may not exist (BY_KEY always looks).
    """
    HALF: tl.constexpr = min(BITS, 32)
    HALVES: tl.constexpr = BITS // HALF
    if BY_KEY:
        first = start + HALF * tl.arange(0, SPAN // HALF)
        halves = tl.zeros([SPAN // HALF, outer.numel], tl.uint32)
        for bit in tl.static_range(HALF):
            rows = tl.minimum(first + bit, inner_count - 1).to(tl.int64)
            tile = tl.load(mask + (rows[:, None] * strides.row + outer[None, :] * strides.column))
            halves |= (tile != 0).to(tl.uint32) << bit
        halves = tl.trans(halves)
    else:
        inner = start + tl.arange(0, SPAN)
        if CHECK:
            inner = tl.minimum(inner, inner_count - 1)
        tile = tl.load(mask + (outer[:, None].to(tl.int64) * strides.row + inner[None, :] * strides.column))
        bits = (tl.reshape(tile, [outer.numel, SPAN // HALF, HALF]) != 0).to(tl.uint32)
        halves = tl.sum(bits << tl.arange(0, HALF)[None, None, :], 2)
    halves = tl.reshape(halves, [outer.numel, SPAN // BITS, HALVES]).to(tl.int64)
    return tl.sum(halves << (tl.arange(0, HALVES) * 32)[None, None, :], 2)


@triton.jit(do_not_specialize=["query_count", "key_count"])
def mask_survey(
    mask, mask_strides, found, words, query_count, key_count,
    OUTER: tl.constexpr, INNER: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """One program: a row of blocks, OUTER queries by all keys of a plane, or with BY_KEY OUTER keys by all queries."""
    PARTS: tl.constexpr = INNER // BITS
    outer_count = key_count if BY_KEY else query_count
    inner_count = query_count if BY_KEY else key_count
    outer_blocks = tl.cdiv(outer_count, OUTER)
    inner_blocks = tl.cdiv(inner_count, INNER)
    plane = tl.program_id(0) // outer_blocks
    block = tl.program_id(0) % outer_blocks
    mask += plane.to(tl.int64) * mask_strides.batch
    target = found + tl.program_id(0).to(tl.int64) * (HEADER + inner_blocks + 1)
    outer = block * OUTER + tl.arange(0, OUTER)
    words = row_of_words(words, plane, block, outer_blocks, inner_blocks, OUTER, PARTS)
    first = inner_blocks
    end = 0
    for start in range(0, inner_blocks, COUNT):
        whole = (block + 1) * OUTER <= outer_count
        if not BY_KEY:
            whole = whole & ((start + COUNT) * INNER <= inner_count)
        if whole:
            tile = packed(mask, mask_strides, outer, start * INNER, inner_count, COUNT * INNER, BITS, BY_KEY, False)
        else:  # the last row or key stands for those past the end
            inside = tl.minimum(outer, outer_count - 1)
            tile = packed(mask, mask_strides, inside, start * INNER, inner_count, COUNT * INNER, BITS, BY_KEY, True)
        index = start * PARTS + tl.arange(0, COUNT * PARTS)
        place = words[:, None] + index[None, :].to(tl.int64) * (outer_blocks * OUTER)
        tl.store(place, tile, mask=(index < inner_blocks * PARTS)[None, :])
        blocks = tl.reshape(tile, [OUTER, COUNT, PARTS])
        something = tl.max(tl.max((blocks != 0).to(tl.int32), 2), 0)
        WHOLE: tl.constexpr = -1 if BITS == 64 else (1 << BITS) - 1
        everything = tl.min(tl.min((blocks == WHOLE).to(tl.int32), 2), 0)
        index = start + tl.arange(0, COUNT)
        tl.store(target + HEADER + index, something + everything, mask=index < inner_blocks)
        holds = (something != 0) & (index < inner_blocks)
        first = tl.minimum(first, tl.min(tl.where(holds, index, inner_blocks), 0))
        end = tl.maximum(end, tl.max(tl.where(holds, index + 1, 0), 0))
    tl.store(target, first)
    tl.store(target + 1, end)


@triton.jit
def row_of_words(
    words, plane, block, outer_blocks, inner_blocks, OUTER: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Where the first word of each of OUTER rows stands; a row's next is outer_blocks * OUTER further."""
    behind = tl.cast(plane, tl.int64) * (inner_blocks * PARTS) * (outer_blocks * OUTER)
    return words + behind + block * OUTER + tl.arange(0, OUTER)


@triton.jit
def narrowed(
    survey, mask_strides, batch, block, outer_blocks, inner_count, start, end, OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """((kinds, words, step between them) of one row of blocks, start, end), without what stands before its first block
    and behind its last."""
    PARTS: tl.constexpr = INNER // 64 if INNER > 64 else 1
    found, words = survey
    plane = tl.where(mask_strides.batch == 0, 0, batch)
    inner_blocks = tl.cdiv(inner_count, INNER)
    found += (plane * outer_blocks + block).to(tl.int64) * (HEADER + inner_blocks + 1)
    start = tl.maximum(start, tl.load(found) * INNER)
    end = tl.minimum(end, tl.load(found + 1) * INNER)
    words = row_of_words(words, plane, block, outer_blocks, inner_blocks, OUTER, PARTS)
    return (found + HEADER, words, outer_blocks * OUTER), start, end


@triton.jit
def held_by(survey, block, INNER: tl.constexpr, VARIANT: tl.constexpr):
    """(kind, bits of each row, those past the 64th place) of a block; of one past either end something, so that a loop
    may ask one block ahead."""
    held = MIXED, 0, 0
    if VARIANT.surveyed:
        kinds, words, step = survey
        PARTS: tl.constexpr = INNER // 64 if INNER > 64 else 1
        place = words + tl.cast(block * PARTS, tl.int64) * step
        bits = tl.load(place)
        further = bits
        if PARTS == 2:
            further = tl.load(place + step)
        held = tl.load(kinds + block), bits, further
    return held


@triton.jit
def allowed_by(held, INNER: tl.constexpr):
    """Whether a block's places are allowed, [outer, INNER], from what `held_by` found."""
    place = tl.arange(0, INNER)[None, :]
    bits = held[1][:, None]
    if INNER > 64:
        bits = tl.where(place < 64, bits, held[2][:, None])
    within = place % 64
    # In two steps: which of eight places is a thread's affair and shifts a word once; the rest the compiler knows.
    return (((bits >> (within % 8)) >> (within // 8 * 8)) & 1) != 0
