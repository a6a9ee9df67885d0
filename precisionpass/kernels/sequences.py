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
def of_program(blocks, parts, numbers, VARIANT: tl.constexpr):
    """(batch, part, block) of this program, `parts` being the heads of a sequence, or further parts of theirs.

    Blocks of a head are neighbours, as they share its keys; with `together` some sequences' same blocks are.
    """
    program = tl.program_id(0)
    member, together = 0, 1
    if VARIANT.together:
        together = numbers.together
        member = program % together
        program = program // together
    rest = program // blocks
    return rest // parts * together + member, rest % parts, program % blocks


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
def of_rows(
    batch, block, total_rows, total_keys, diagonal, numbers, QUERY_BLOCK: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """(sequence, block in it, first row, rows, first key, keys, diagonal) for a program with a block of rows."""
    sequence, first_row, rows, first_key, keys = batch, 0, total_rows, 0, total_keys
    if VARIANT.packed:
        packing = numbers.packing
        sequence, block = find(block, packing.rows, packing.sequences, total_rows, QUERY_BLOCK)
        first_row, rows, first_key, keys, diagonal = spans(sequence, total_rows, total_keys, packing, VARIANT)
        seen = (sequence < packing.sequences) & (block * QUERY_BLOCK < rows)
        keys = tl.where(seen, keys, 0)
    return sequence, block, first_row, rows, first_key, keys, diagonal


@triton.jit
def of_keys(
    batch, block, total_rows, total_keys, diagonal, numbers, KEY_BLOCK: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """The same for a program with a block of keys."""
    sequence, first_row, rows, first_key, keys = batch, 0, total_rows, 0, total_keys
    if VARIANT.packed:
        packing = numbers.packing
        sequence, block = find(block, packing.keys, packing.sequences, total_keys, KEY_BLOCK)
        first_row, rows, first_key, keys, diagonal = spans(sequence, total_rows, total_keys, packing, VARIANT)
        seen = (sequence < packing.sequences) & (block * KEY_BLOCK < keys)
        rows = tl.where(seen, rows, 0)
    return sequence, block, first_row, rows, first_key, keys, diagonal


@triton.jit
def moved(pointer, strides, first_row, first_key):
    """A pointer to [B, H, rows, keys or width] at a sequence's beginning; a broadcast axis has a stride of 0."""
    return pointer + first_row.to(tl.int64) * strides.row + first_key * strides.column


@triton.jit
def inputs_at(
    query, query_strides, key, key_strides, value, value_strides, first_row, first_key, VARIANT: tl.constexpr,
):  # fmt: skip
    """(query, key, value) at a sequence's beginning; those of a dense batch as they are."""
    if VARIANT.packed:
        query = moved(query, query_strides, first_row, 0)
        key = moved(key, key_strides, first_key, 0)
        value = moved(value, value_strides, first_key, 0)
    return query, key, value


@triton.jit
def plane_of(term, strides, batch, head):
    """A mask or bias at one head's rows and keys."""
    return term + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head
