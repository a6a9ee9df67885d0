"""Dropout of P: the same Philox stream in forward and backward, whatever the tile size or the orientation."""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
AT_A_TIME = tl.constexpr(8)  # neighbouring keys that share one call of Philox, 16 bits each (reference/dropout.py)


@triton.jit
def keep(
    seed, batch_head, query_index, key_start, query_count, key_count, numbers,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """True where P[b, h, i, j] is kept, [QUERY_BLOCK, KEY_BLOCK] or its transpose.

    Key j reads half j % 2 of word (j % 8) // 2 of Philox 4x32-7 at ((b*H + h)*Sq + i)*ceil(Sk / 8) + j // 8, 64 bits.
    Of packed sequences i counts over all rows, j within its own; Sq and Sk are all rows and all keys.
    """
    if VARIANT.packed:
        query_index = query_index + numbers.place.first_row
        query_count, key_count = numbers.place.rows, numbers.place.keys
    row = batch_head.to(tl.int64) * query_count + tl.reshape(query_index, [QUERY_BLOCK]).to(tl.int64)
    call = key_start // AT_A_TIME + tl.arange(0, KEY_BLOCK // AT_A_TIME)
    offset = row[:, None] * tl.cdiv(key_count, AT_A_TIME) + call[None, :].to(tl.int64)
    first, second, third, fourth = tl.randint4x(seed, offset, ROUNDS)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    words = tl.reshape(words, [QUERY_BLOCK, KEY_BLOCK // AT_A_TIME, 4])
    halves = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [QUERY_BLOCK, KEY_BLOCK])
    kept = halves.to(tl.int32) >= tl.cast(numbers.dropout * 65536.0, tl.int32)
    if TRANSPOSED:
        kept = tl.trans(kept)
    return kept


@triton.jit
def keep_scale(probability):
    """What a kept P is multiplied by: 1 / (1 - p), 0 where p is 1."""
    return tl.where(probability < 1.0, 1.0 / (1.0 - probability), 0.0)
