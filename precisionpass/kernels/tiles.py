"""Reading and writing tiles of [batch, head, row, column] tensors, by descriptor or by pointer with any strides."""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source, strides, batch, head, start, row_count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] from row `start` of source[batch, head]; columns past COLUMNS read as zero, and rows past
    `row_count` too when CHECK is set (a descriptor always checks)."""
    if DESCRIPTOR:
        tile = source.load([batch, head, start, 0]).reshape(ROWS, WIDTH)
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        # 64 bits up to the tile's corner, 32 within it: long tensors pass 2^31 elements, a tile never does.
        corner = source + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head
        corner += tl.cast(start, tl.int64) * strides.row
        pointers = corner + rows[:, None] * strides.row + columns[None, :] * strides.column
        if CHECK:
            inside = rows[:, None] < row_count - start
            if COLUMNS < WIDTH:
                inside = inside & (columns[None, :] < COLUMNS)
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif COLUMNS < WIDTH:
            tile = tl.load(pointers, mask=columns[None, :] < COLUMNS, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_statistic(source, inside, other, CHECK: tl.constexpr):
    """A number of each row, unchecked where the memory is padded to whole tiles."""
    if CHECK:
        rows = tl.load(source, mask=inside, other=other)
    else:
        rows = tl.load(source)
    return rows


@triton.jit
def store_tile(
    target, strides, batch, head, start, row_count, tile,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Write a [ROWS, WIDTH] tile; rows past `row_count` and columns past COLUMNS are left out."""
    if DESCRIPTOR:
        target.store([batch, head, start, 0], tile.reshape(1, 1, ROWS, WIDTH))
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        corner = target + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head
        corner += tl.cast(start, tl.int64) * strides.row
        inside = rows[:, None] < row_count - start
        if COLUMNS < WIDTH:
            inside = inside & (columns[None, :] < COLUMNS)
        tl.store(corner + rows[:, None] * strides.row + columns[None, :] * strides.column, tile, mask=inside)
