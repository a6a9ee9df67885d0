"""Packed sequences: which of them a program works on, found on the device from cu_seqlens.

Sequence n gets the blocks from cu_seqlens[n] // BLOCK + n on. That is always enough of them (the end of n lies at most
one block behind its beginning's), so a grid of total // BLOCK + sequences + 1 programs, which the host knows, serves
any lengths; a program that finds itself past its sequence's end has no key to read and no row to store.
"""

import triton
import triton.language as tl


def most_blocks(total: int, sequences: int, block: int) -> int:
    """The blocks of `block` rows that `sequences` of them, and what stands behind the last, may need."""
    return total // block + sequences + 1


@triton.jit
def blocks(total, BLOCK: tl.constexpr, numbers, VARIANT: tl.constexpr):
    """The blocks of one head in the grid, as `most_blocks` of a packed attention counts them."""
    count = tl.cdiv(total, BLOCK)
    if VARIANT.packed:
        count = total // BLOCK + numbers.packing.sequences + 1
    return count


@triton.jit
def boundary(cumulative, index, sequences, total):
    """Where sequence `index` begins; of the one behind the last its end too. Never outside [0, total]."""
    found = tl.load(cumulative + tl.minimum(index, sequences))
    found = tl.where(index == 0, 0, tl.minimum(tl.maximum(found, 0), total))
    return tl.where(index > sequences, total, found)


@triton.jit
def find(block, cumulative, sequences, total, BLOCK: tl.constexpr):
    """(sequence that block number `block` belongs to, the block's number in it): the last that begins before it."""
    low = block * 0
    high = low + sequences
    while low < high:
        middle = (low + high + 1) // 2
        begins = boundary(cumulative, middle, sequences, total) // BLOCK + middle
        inside = begins <= block
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low, block - boundary(cumulative, low, sequences, total) // BLOCK - low


@triton.jit
def span(cumulative, sequence, sequences, total):
    """(first, count) of a sequence's rows or keys."""
    first = boundary(cumulative, sequence, sequences, total)
    return first, tl.maximum(boundary(cumulative, sequence + 1, sequences, total) - first, 0)


@triton.jit
def spans(sequence, total_rows, total_keys, packing, VARIANT: tl.constexpr):
    """(first row, rows, first key, keys, diagonal) of a sequence. What stands behind the last sees nothing."""
    first_row, rows = span(packing.rows, sequence, packing.sequences, total_rows)
    first_key, keys = span(packing.keys, sequence, packing.sequences, total_keys)
    diagonal = 0
    if VARIANT.bottom_right:
        diagonal = keys - rows
    return first_row, rows, first_key, keys, diagonal


@triton.jit
def of_rows(block, total_rows, total_keys, packing, QUERY_BLOCK: tl.constexpr, VARIANT: tl.constexpr):
    """(sequence, block in it, first row, rows, first key, keys, diagonal) for a program with a block of rows."""
    sequence, block = find(block, packing.rows, packing.sequences, total_rows, QUERY_BLOCK)
    first_row, rows, first_key, keys, diagonal = spans(sequence, total_rows, total_keys, packing, VARIANT)
    seen = (sequence < packing.sequences) & (block * QUERY_BLOCK < rows)
    return sequence, block, first_row, rows, first_key, tl.where(seen, keys, 0), diagonal


@triton.jit
def of_keys(block, total_rows, total_keys, packing, KEY_BLOCK: tl.constexpr, VARIANT: tl.constexpr):
    """The same for a program with a block of keys."""
    sequence, block = find(block, packing.keys, packing.sequences, total_keys, KEY_BLOCK)
    first_row, rows, first_key, keys, diagonal = spans(sequence, total_rows, total_keys, packing, VARIANT)
    seen = (sequence < packing.sequences) & (block * KEY_BLOCK < keys)
    return sequence, block, first_row, tl.where(seen, rows, 0), first_key, keys, diagonal


@triton.jit
def moved(pointer, strides, first_row, first_key):
    """A pointer to [B, H, rows, keys or width] at a sequence's beginning; a broadcast axis has a stride of 0."""
    return pointer + first_row.to(tl.int64) * strides.row + first_key * strides.column
