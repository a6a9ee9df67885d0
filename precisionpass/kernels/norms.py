"""LayerNorm and RMSNorm over rows, forward and backward: FP32 two-pass statistics, one rounding (NUMERICS 7).

    y  = (x - mean) * rstd * (weight + offset) + bias            mean = 0 for RMSNorm; x may be a sum, formed here
    dx = rstd * (gw - mean(gw) - xhat * mean(gw * xhat))          gw = g * (weight + offset); no mean(gw) for RMSNorm;
                                                                  plus a further gradient of x, where there is one
    dweight = sum over rows of g * xhat                          dbias = sum over rows of g

With ONCE a tile holds whole rows, which stay in registers between the passes; wider ones are read again, from a cache.
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
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS rows: their mean (CENTER), rstd = 1 / sqrt(mean((x - mean)^2) + eps), and y. RESIDUAL needs ONCE."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    mean = tl.zeros([ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    if ONCE:
        column = tl.arange(0, WIDTH)
        inside = exists[:, None] & (column < columns)[None, :]
        value = load_sum(x, residual, total, row, stride, residual_stride, column, columns, inside, RESIDUAL)
        if CENTER:
            mean = tl.sum(value, 1) / columns
            value = tl.where(inside, value - mean[:, None], 0.0)
        square = tl.sum(value * value, 1)
        rstd = 1.0 / tl.sqrt_rn(square / columns + eps)
        store_norm(y, value * rstd[:, None], weight, bias, row, column, inside, columns, offset, WEIGHT, BIAS)
    else:
        if CENTER:
            for start in range(0, columns, WIDTH):
                column = start + tl.arange(0, WIDTH)
                inside = exists[:, None] & (column < columns)[None, :]
                mean += tl.sum(load_rows(x, row, stride, column, inside), 1)
            mean = mean / columns
        for start in range(0, columns, WIDTH):
            column = start + tl.arange(0, WIDTH)
            inside = exists[:, None] & (column < columns)[None, :]
            value = tl.where(inside, load_rows(x, row, stride, column, inside) - mean[:, None], 0.0)
            square += tl.sum(value * value, 1)
        rstd = 1.0 / tl.sqrt_rn(square / columns + eps)
        for start in range(0, columns, WIDTH):
            column = start + tl.arange(0, WIDTH)
            inside = exists[:, None] & (column < columns)[None, :]
            value = (load_rows(x, row, stride, column, inside) - mean[:, None]) * rstd[:, None]
            store_norm(y, value, weight, bias, row, column, inside, columns, offset, WEIGHT, BIAS)
    if CENTER:
        tl.store(means + row, mean, mask=exists)
    tl.store(rstds + row, rstd, mask=exists)


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
def norm_backward(
    gradient, gradient_stride, x, stride, weight, means, rstds, further, dx, dweight, dbias,
    rows, columns, offset, rows_each,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, FURTHER: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx of `rows_each` rows that WIDTH holds, and this program's part of dweight and dbias, in the rows' order."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    scale_sum = tl.zeros([WIDTH], tl.float32)
    level_sum = tl.zeros([WIDTH], tl.float32)
    last = tl.minimum((program + 1) * rows_each, rows)
    for start in range(program * rows_each, last, ROWS):
        row = start + tl.arange(0, ROWS)
        exists = row < last
        inside = exists[:, None] & (column < columns)[None, :]
        rstd = tl.load(rstds + row, mask=exists, other=0.0)
        mean = tl.zeros([ROWS], tl.float32)
        if CENTER:
            mean = tl.load(means + row, mask=exists, other=0.0)
        slope, normalised, scaled = gradient_terms(
            gradient, gradient_stride, x, stride, weight, row, column, inside, mean, rstd, columns, offset, WEIGHT
        )
        if DWEIGHT:
            scale_sum += tl.sum(slope * normalised, 0)
        if DBIAS:
            level_sum += tl.sum(slope, 0)
        if DX:
            along = tl.sum(scaled * normalised, 1) / columns
            result = scaled - normalised * along[:, None]
            if CENTER:
                result = result - (tl.sum(scaled, 1) / columns)[:, None]
            store_gradient(dx, result * rstd[:, None], further, row, column, columns, inside, FURTHER)
    place = program.to(tl.int64) * columns + column
    if DWEIGHT:
        tl.store(dweight + place, scale_sum, mask=column < columns)
    if DBIAS:
        tl.store(dbias + place, level_sum, mask=column < columns)


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
