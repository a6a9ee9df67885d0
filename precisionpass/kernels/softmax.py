"""softmax and log_softmax along one dimension, forward and backward: FP32 from the maximum to the one rounding.

    y  = exp(x - m) / l          dx = y * (g - sum g*y)              or    y = x - m - log l,    dx = g - exp(y) * sum g

A row of `dim` is read at its stride; `inner` rows stand side by side in memory. With ONCE a tile holds whole rows;
wider ones are read again, from a cache. The backward makes y again from x: a rounded y does not sum to 1.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2_HIGH = tl.constexpr(0.693145751953125)  # 15 bits: exact times a small integer
LN_2_LOW = tl.constexpr(1.4286068203094172e-6)
SMALLEST = tl.constexpr(-104.0)  # exp of less is 0 in FP32


@triton.jit
def exponential(x, PRECISE: tl.constexpr):
    """exp(x) for x <= 0; PRECISE: to one unit of FP32 at any magnitude, where exp2(x * log2 e) is off by |x| of them.

    x = whole * ln 2 + rest; exp(rest) = 1 + rest + rest^2 p(rest), p of degree 5 (Cephes).
    """
    if not PRECISE:
        return tl.exp2(x * LOG2_E)
    x = tl.where(x < SMALLEST, SMALLEST, x)  # keeps NaN
    whole = tl.floor(x * LOG2_E + 0.5)
    rest = tl.fma(-whole, LN_2_LOW, tl.fma(-whole, LN_2_HIGH, x))
    series = tl.fma(rest, 1.9875691500e-4, 1.3981999507e-3)
    series = tl.fma(rest, series, 8.3334519073e-3)
    series = tl.fma(rest, series, 4.1665795894e-2)
    series = tl.fma(rest, series, 1.6666665459e-1)
    series = tl.fma(rest, series, 5.0000001201e-1)
    return (1.0 + tl.fma(rest * rest, series, rest)) * tl.exp2(whole)


@triton.jit
def divided(weights, total, PRECISE: tl.constexpr):
    """weights / total, to two units of FP32; PRECISE: rounded once, for results that stay FP32."""
    if PRECISE:
        return tl.div_rn(weights, total)
    return weights * (1.0 / total)


@triton.jit
def load_tile(source, row, column, rows, columns, inner, other, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] in FP32 of a contiguous [.., columns, inner] tensor: row r is (r // inner, :, r % inner)."""
    start = (row // inner).to(tl.int64) * columns * inner + row % inner
    place = start[:, None] + column[None, :].to(tl.int64) * inner
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(source + place, mask=inside, other=other).to(tl.float32), place, inside


@triton.jit
def sum_both(one, other):
    """Two sums over the columns at once: one exchange between warps, and none of the terms is kept for the second."""
    return tl.split(tl.sum(tl.join(one, other), 1))


@triton.jit
def statistics(
    gradient, x, row, rows, columns, inner,
    GRADIENT: tl.constexpr, LOG: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(m, l, a) of rows wider than a tile, in one pass: l = sum exp(x - m), a = sum g exp(x - m), LOG: sum g.

    Every lane keeps a maximum and sums of its own; they meet once, at the end.
    """
    largest = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    along = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        value, _, _ = load_tile(x, row, column, rows, columns, inner, float("-inf"), ROWS, WIDTH)
        higher = tl.maximum(largest, value, propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before = exponential(largest - shift, PRECISE)
        weights = exponential(value - shift, PRECISE)
        total = total * before + weights
        if GRADIENT:
            slope, _, _ = load_tile(gradient, row, column, rows, columns, inner, 0.0, ROWS, WIDTH)
            if LOG:
                along += slope
            else:
                along = along * before + slope * weights
        largest = higher
    top = tl.max(largest, 1)
    rescaled = exponential(largest - top[:, None], PRECISE)
    if not LOG:
        along = along * rescaled
    along = tl.sum(along, 1)
    total = tl.sum(total * rescaled, 1)
    return top, total, along


@triton.jit
def softmax_forward(
    x, y, rows, columns, inner, LOG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ONCE: tl.constexpr
):
    """y of ROWS rows. A row of -inf, or with +inf or NaN, gives NaN."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ONCE:
        value, place, inside = load_tile(
            x, row, tl.arange(0, WIDTH), rows, columns, inner, float("-inf"), ROWS, WIDTH
        )
        value = value - tl.max(value, 1)[:, None]
        weights = exponential(value, PRECISE)
        total = tl.sum(tl.where(inside, weights, 0.0), 1)[:, None]
        if LOG:
            result = value - tl.log(total)
        else:
            result = divided(weights, total, PRECISE)
        tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
    else:
        largest, total, _ = statistics(x, x, row, rows, columns, inner, False, LOG, PRECISE, ROWS, WIDTH)
        for start in range(0, columns, WIDTH):
            column = start + tl.arange(0, WIDTH)
            value, place, inside = load_tile(x, row, column, rows, columns, inner, 0.0, ROWS, WIDTH)
            value = value - largest[:, None]
            if LOG:
                result = value - tl.log(total)[:, None]
            else:
                result = divided(exponential(value, PRECISE), total[:, None], PRECISE)
            tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward(
    gradient, x, dx, rows, columns, inner,
    LOG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """dx of ROWS rows."""
    PRECISE: tl.constexpr = dx.dtype.element_ty == tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ONCE:
        column = tl.arange(0, WIDTH)
        value, place, inside = load_tile(x, row, column, rows, columns, inner, float("-inf"), ROWS, WIDTH)
        slope, _, _ = load_tile(gradient, row, column, rows, columns, inner, 0.0, ROWS, WIDTH)
        largest = tl.max(value, 1)[:, None]
        weights = tl.where(inside, exponential(value - largest, PRECISE), 0.0)
        if LOG:
            total, along = sum_both(weights, slope)
        else:
            total, along = sum_both(weights, weights * slope)
        store_slope(dx, place, inside, slope, weights, total, along, LOG)
    else:
        largest, total, along = statistics(gradient, x, row, rows, columns, inner, True, LOG, PRECISE, ROWS, WIDTH)
        for start in range(0, columns, WIDTH):
            column = start + tl.arange(0, WIDTH)
            slope, place, inside = load_tile(gradient, row, column, rows, columns, inner, 0.0, ROWS, WIDTH)
            value, _, _ = load_tile(x, row, column, rows, columns, inner, 0.0, ROWS, WIDTH)
            weights = exponential(value - largest[:, None], PRECISE)
            store_slope(dx, place, inside, slope, weights, total, along, LOG)


@triton.jit
def store_slope(dx, place, inside, slope, weights, total, along, LOG: tl.constexpr):
    """dx from y = weights / total, and along: the sum of g weights (LOG: of g)."""
    share = weights * (1.0 / total)[:, None]
    if LOG:
        result = slope - share * along[:, None]
    else:
        result = share * (slope - (along / total)[:, None])
    tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
