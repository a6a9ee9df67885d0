"""The bounded shift of rows whose maximum repeats (NUMERICS 2), online: monotone, and the same for every tile size.

    s = max(s_old, min(beta*m, m + limit))  for m > 0,      max(s_old, min(0, m + limit))  for m < 0,    where m repeats
    s = max(s_old, m)                       elsewhere

A maximum repeats where the second largest score stands within `tolerance` of it. That score is carried over the tiles:
with it the answer for the keys seen so far is exact, however they are cut, which a count of repeats would not be.
"""

import triton
import triton.language as tl


@triton.jit
def start(QUERY_BLOCK: tl.constexpr):
    """(largest score, second largest, shift) of rows that have seen no key."""
    nothing = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    return nothing, nothing, nothing


@triton.jit
def advance(state, values, numbers):
    """The state after a tile of scores in natural units, [rows, keys]. s - m never passes the limit: m only grows."""
    row_max, second, shift = state
    tile_max = tl.max(values, 1)
    at_max = values == tile_max[:, None]
    below = tl.max(tl.where(at_max, float("-inf"), values), 1)
    tile_second = tl.where(tl.sum(at_max.to(tl.int32), 1) > 1, tile_max, below)
    second = tl.maximum(tl.maximum(second, tile_second), tl.minimum(row_max, tile_max))
    row_max = tl.maximum(row_max, tile_max)

    upper = row_max + numbers.shift.limit
    shifted = tl.where(row_max > 0, tl.minimum(numbers.shift.beta * row_max, upper), tl.minimum(upper, 0.0))
    repeats = (second >= row_max - numbers.shift.tolerance) & (row_max != 0)
    wanted = tl.where(repeats, tl.maximum(row_max, shifted), row_max)
    return row_max, second, tl.maximum(shift, wanted)
