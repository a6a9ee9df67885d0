"""LayerNorm and RMSNorm over rows: FP32 two-pass statistics, one rounding (NUMERICS 7).

    y = (x - mean) * rstd * (weight + offset) + bias             mean = 0 for RMSNorm; x may be a sum, formed here

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
    mean = tl.zeros([ROWS], tl.float32)
    if CENTER:
        mean = tl.div_rn(tl.sum(value, 1), columns + tl.zeros([ROWS], tl.float32))
        value = tl.where(inside, value - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / columns + eps)
    store_norm(y, value * rstd[:, None], weight, bias, row, column, inside, columns, offset, WEIGHT, BIAS)
    if CENTER:
        tl.store(means + row, mean, mask=exists)
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
