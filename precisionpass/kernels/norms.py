"""LayerNorm and RMSNorm over rows, forward and backward: FP32 two-pass statistics, one rounding (NUMERICS 7).

    y  = (x - mean) * rstd * (weight + offset) + bias            mean = 0 for RMSNorm; x may be a sum, formed here
    dx = rstd * (gw - mean(gw) - xhat * mean(gw * xhat))          gw = g * (weight + offset); no mean(gw) for RMSNorm;
                                                                  plus a further gradient of x, where there is one
    dweight = sum over rows of g * xhat                          dbias = sum over rows of g

A tile holds whole rows, which stay in registers between the passes; wider ones are read again, from a cache.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(source, row, stride, column, inside):
    """[rows, columns] in FP32, 0 outside."""
    return tl.load(source + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_sum(source, residual, total, row, stride, residual_stride, column, columns, inside, RESIDUAL: tl.constexpr):
    """Rows of x in FP32; with a residual those of x + residual, rounded to x's format as the model does, and stored."""
    value = load_rows(source, row, stride, column, inside)
    if RESIDUAL:
        rounded = (value + load_rows(residual, row, residual_stride, column, inside)).to(total.dtype.element_ty)
        tl.store(total + row[:, None].to(tl.int64) * columns + column[None, :], rounded, mask=inside)
        value = rounded.to(tl.float32)
    return value


@triton.jit
def load_scale(weight, column, columns, offset, WEIGHT: tl.constexpr):
    """weight + offset as one row of FP32, or ones."""
    if WEIGHT:
        scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32) + offset
    else:
        scale = tl.full([column.shape[0]], 1.0, tl.float32)
    return scale[None, :]


@triton.jit
def store_norm(y, value, weight, bias, row, column, inside, columns, offset, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """y = value * (weight + offset) + bias, rounded once."""
    value = value * load_scale(weight, column, columns, offset, WEIGHT)
    if BIAS:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None].to(tl.int64) * columns + column[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_forward(
    x, stride, residual, residual_stride, total, y, weight, bias, means, rstds, rows, columns, eps, offset,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows: their mean (CENTER), rstd = 1 / sqrt(mean((x - mean)^2) + eps), and y."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    column = tl.arange(0, WIDTH)
    inside = exists[:, None] & (column < columns)[None, :]
    value = load_sum(x, residual, total, row, stride, residual_stride, column, columns, inside, RESIDUAL)
    if CENTER:
        mean = tl.sum(value, 1) / columns
        value = tl.where(inside, value - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=exists)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / columns + eps)
    store_norm(y, value * rstd[:, None], weight, bias, row, column, inside, columns, offset, WEIGHT, BIAS)
    tl.store(rstds + row, rstd, mask=exists)


@triton.jit
def norm_forward_wide(
    x, stride, y, weight, bias, means, rstds, rows, columns, eps, offset,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row wider than a tile, read twice: every lane keeps its own mean and squares (Welford), which meet once."""
    row = tl.program_id(0) + tl.arange(0, 1)
    lane = tl.arange(0, WIDTH)
    middle = tl.zeros([1, WIDTH], tl.float32)
    square = tl.zeros([1, WIDTH], tl.float32)
    for start in tl.range(0, columns, WIDTH, num_stages=STAGES):
        column = start + lane
        inside = (column < columns)[None, :]
        value = load_rows(x, row, stride, column, inside)
        step = value - middle
        if CENTER:
            middle = tl.where(inside, middle + step / (start // WIDTH + 1), middle)
        square += tl.where(inside, step * (value - middle), 0.0)
    mean = tl.zeros([1], tl.float32)
    if CENTER:
        count = ((columns - lane + WIDTH - 1) // WIDTH).to(tl.float32)[None, :]  # of this lane
        mean = tl.sum(middle * count, 1) / columns
        middle -= mean[:, None]
        square += middle * middle * count
        tl.store(means + row, mean)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(square, 1) / columns + eps)
    for start in tl.range(0, columns, WIDTH, num_stages=STAGES):
        column = start + lane
        inside = (column < columns)[None, :]
        value = (load_rows(x, row, stride, column, inside) - mean[:, None]) * rstd[:, None]
        store_norm(y, value, weight, bias, row, column, inside, columns, offset, WEIGHT, BIAS)
    tl.store(rstds + row, rstd)


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


@triton.jit
def add_pairs(along, level, more_along, more_level):
    """Two sums at once: one exchange between warps instead of two."""
    return along + more_along, level + more_level


@triton.jit
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
            if CENTER:
                along, level = tl.reduce((scaled * normalised, scaled), 1, add_pairs)
                result = scaled - (level / columns)[:, None] - normalised * (along / columns)[:, None]
            else:
                result = scaled - normalised * (tl.sum(scaled * normalised, 1) / columns)[:, None]
            store_gradient(dx, result * rstd, further, row, column, columns, inside, FURTHER)
    place = program.to(tl.int64) * columns + column
    if DWEIGHT:
        tl.store(dweight + place, tl.sum(scale_sum, 0), mask=column < columns)
    if DBIAS:
        tl.store(dbias + place, tl.sum(level_sum, 0), mask=column < columns)


@triton.jit
def norm_backward_wide(
    gradient, gradient_stride, x, stride, weight, means, rstds, further, dx, rows, columns, offset,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, FURTHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx of one row wider than a tile."""
    row = tl.program_id(0) + tl.arange(0, 1)
    rstd = tl.load(rstds + row)
    mean = tl.zeros([1], tl.float32)
    if CENTER:
        mean = tl.load(means + row)
    along = tl.zeros([1], tl.float32)
    level = tl.zeros([1], tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = (column < columns)[None, :]
        _, normalised, scaled = gradient_terms(
            gradient, gradient_stride, x, stride, weight, row, column, inside, mean, rstd, columns, offset, WEIGHT
        )
        along += tl.sum(scaled * normalised, 1)
        if CENTER:
            level += tl.sum(scaled, 1)
    for start in range(0, columns, WIDTH):
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
