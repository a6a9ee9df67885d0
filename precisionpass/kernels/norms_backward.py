"""The backward of LayerNorm and RMSNorm over rows.

    dx = rstd * (gw - mean(gw) - xhat * mean(gw * xhat))          gw = g * (weight + offset); no mean(gw) for RMSNorm;
                                                                  plus a further gradient of x, where there is one
    dweight = sum over rows of g * xhat                           dbias = sum over rows of g

Sums over rows are FP32 and added up in a fixed order. A program keeps its part of them in registers beside its rows;
where they do not fit, two programs share a row, and where that is not enough, another kernel makes them.
"""

import triton
import triton.language as tl

from precisionpass.kernels.norms import load_rows, load_scale
from precisionpass.kernels.softmax import sum_both


@triton.jit
def gradient_terms(
    gradient, gradient_stride, x, stride, weight, row, column, inside, mean, rstd, columns, offset, WEIGHT: tl.constexpr
):
    """g, xhat and gw of a tile, 0 outside."""
    slope = load_rows(gradient, row, gradient_stride, column, inside)
    normalised = tl.where(inside, (load_rows(x, row, stride, column, inside) - mean[:, None]) * rstd[:, None], 0.0)
    return slope, normalised, slope * load_scale(weight, column, columns, offset, WEIGHT)


@triton.jit
def store_gradient(dx, value, further, row, column, columns, inside, FURTHER: tl.constexpr):
    """dx = value + further, rounded once."""
    if FURTHER:
        value += load_rows(further, row, columns, column, inside)
    tl.store(dx + row[:, None].to(tl.int64) * columns + column[None, :], value.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["programs"])
def norm_backward(
    gradient, gradient_stride, x, stride, weight, means, rstds, further, dx, dweight, dbias,
    rows, columns, offset, programs,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, FURTHER: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every `programs`-th tile of rows that WIDTH holds, and this program's part of dweight and dbias, in order.

    The sums for the parameters stay in registers; the next rows are on their way while these are worked on (STAGES).
    """
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    scale = load_scale(weight, column, columns, offset, WEIGHT)
    scale_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    level_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        exists = row < rows
        inside = exists[:, None] & (column < columns)[None, :]
        slope = load_rows(gradient, row, gradient_stride, column, inside)
        value = load_rows(x, row, stride, column, inside)
        rstd = tl.load(rstds + row, mask=exists, other=0.0)[:, None]
        if CENTER:
            value = value - tl.load(means + row, mask=exists, other=0.0)[:, None]
        normalised = value * rstd
        if DWEIGHT:
            scale_sum += slope * normalised
        if DBIAS:
            level_sum += slope
        if DX:
            scaled = slope * scale
            along = tl.sum(scaled * normalised, 1) / columns
            if CENTER:
                scaled -= (tl.sum(scaled, 1) / columns)[:, None]
            result = scaled - normalised * along[:, None]
            store_gradient(dx, result * rstd, further, row, column, columns, inside, FURTHER)
    place = program.to(tl.int64) * columns + column
    if DWEIGHT:
        tl.store(dweight + place, tl.sum(scale_sum, 0), mask=column < columns)
    if DBIAS:
        tl.store(dbias + place, tl.sum(level_sum, 0), mask=column < columns)


@triton.jit(do_not_specialize=["pairs"])
def norm_backward_halves(
    gradient, gradient_stride, x, stride, weight, means, rstds, further, dx, dweight, dbias,
    rows, columns, offset, pairs,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, FURTHER: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two programs a row: each reads all of it, for the row's sums, and makes one half of the results.

    They run side by side, so that the second to read finds the row in the cache.
    """
    pair = tl.program_id(0) // 2
    half = tl.program_id(0) % 2
    column = half * WIDTH + tl.arange(0, WIDTH)
    other = (1 - half) * WIDTH + tl.arange(0, WIDTH)
    inside = (column < columns)[None, :]
    scale_sum = tl.zeros([1, WIDTH], tl.float32)
    level_sum = tl.zeros([1, WIDTH], tl.float32)
    for start in tl.range(pair, rows, pairs, num_stages=STAGES):
        row = start + tl.arange(0, 1)
        slope = load_rows(gradient, row, gradient_stride, column, inside)
        value = load_rows(x, row, stride, column, inside)
        rstd = tl.load(rstds + row)[:, None]
        if CENTER:
            mean = tl.load(means + row)[:, None]
            value = value - mean
        normalised = value * rstd
        if DWEIGHT:
            scale_sum += slope * normalised
        if DBIAS:
            level_sum += slope
        if DX:
            outside = (other < columns)[None, :]
            farther = load_rows(x, row, stride, other, outside)
            if CENTER:
                farther = farther - mean
            scaled_other = load_rows(gradient, row, gradient_stride, other, outside)
            scaled_other = scaled_other * load_scale(weight, other, columns, offset, WEIGHT)
            scaled = slope * load_scale(weight, column, columns, offset, WEIGHT)
            products = scaled * normalised + scaled_other * (farther * rstd)
            along, level = sum_both(products, scaled + scaled_other)
            result = scaled - normalised * (along / columns)[:, None]
            if CENTER:
                result = result - (level / columns)[:, None]
            store_gradient(dx, result * rstd, further, row, column, columns, inside, FURTHER)
    place = pair.to(tl.int64) * columns + column
    if DWEIGHT:
        tl.store(dweight + place, tl.sum(scale_sum, 0), mask=column < columns)
    if DBIAS:
        tl.store(dbias + place, tl.sum(level_sum, 0), mask=column < columns)


@triton.jit
def norm_backward_wide(
    gradient, gradient_stride, x, stride, weight, means, rstds, further, dx, rows, columns, offset,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, FURTHER: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of one row wider than a tile."""
    row = tl.program_id(0) + tl.arange(0, 1)
    rstd = tl.load(rstds + row)
    mean = tl.zeros([1], tl.float32)
    if CENTER:
        mean = tl.load(means + row)
    products = tl.zeros([1, WIDTH], tl.float32)
    slopes = tl.zeros([1, WIDTH], tl.float32)
    for start in tl.range(0, columns, WIDTH, num_stages=STAGES):
        column = start + tl.arange(0, WIDTH)
        inside = (column < columns)[None, :]
        _, normalised, scaled = gradient_terms(
            gradient, gradient_stride, x, stride, weight, row, column, inside, mean, rstd, columns, offset, WEIGHT
        )
        products += scaled * normalised
        slopes += scaled
    along = tl.sum(products, 1)
    level = tl.sum(slopes, 1) if CENTER else tl.zeros([1], tl.float32)
    for start in tl.range(0, columns, WIDTH, num_stages=STAGES):
        column = start + tl.arange(0, WIDTH)
        inside = (column < columns)[None, :]
        _, normalised, scaled = gradient_terms(
            gradient, gradient_stride, x, stride, weight, row, column, inside, mean, rstd, columns, offset, WEIGHT
        )
        result = (scaled - (level / columns)[:, None] - normalised * (along / columns)[:, None]) * rstd[:, None]
        store_gradient(dx, result, further, row, column, columns, inside, FURTHER)


@triton.jit
def norm_parameters(
    gradient, gradient_stride, x, stride, means, rstds, dweight, dbias, rows, columns, rows_each,
    CENTER: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of WIDTH columns, summed over `rows_each` rows in order; for rows wider than a tile."""
    chunks = tl.cdiv(columns, WIDTH)
    part = tl.program_id(0) // chunks
    column = (tl.program_id(0) % chunks) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    scale_sum = tl.zeros([WIDTH], tl.float32)
    level_sum = tl.zeros([WIDTH], tl.float32)
    for row in range(part * rows_each, tl.minimum((part + 1) * rows_each, rows)):
        place = tl.cast(row, tl.int64) * gradient_stride + column
        slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        if DWEIGHT:
            value = tl.load(x + tl.cast(row, tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)
            if CENTER:
                value = value - tl.load(means + row)
            scale_sum += slope * (value * tl.load(rstds + row))
        level_sum += slope
    place = part.to(tl.int64) * columns + column
    if DWEIGHT:
        tl.store(dweight + place, scale_sum, mask=inside)
    if DBIAS:
        tl.store(dbias + place, level_sum, mask=inside)
