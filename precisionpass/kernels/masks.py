"""Which keys a row may attend to, as a relation: j - i - diagonal in [-left, right] (causal: right = 0).

`diagonal` is 0 for top_left and S_k - S_q for bottom_right. Blocks outside the relation are skipped, blocks wholly
inside it run without a comparison, the rest run with one.
"""

import triton
import triton.language as tl


@triton.jit
def inside(query_index, key_index, key_count, left, right, diagonal, VARIANT: tl.constexpr):
    """True where key_index exists and stands within the bounds of query_index; shapes broadcast, any orientation.

    Rows past the end need no test: nothing of them is stored, and in the backward their P is 0.
    """
    allowed = True
    if not VARIANT.whole_keys:
        allowed = key_index < key_count
    if VARIANT.right_bound:
        allowed = allowed & (key_index - query_index <= right + diagonal)
    if VARIANT.left_bound:
        allowed = allowed & (key_index - query_index >= diagonal - left)
    return allowed


@triton.jit
def key_range(
    query_start, key_count, left, right, diagonal,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """(start, whole_start, whole_end, end) of keys for one block of queries, all but `end` multiples of KEY_BLOCK.

    [start, whole_start) and [whole_end, end) need the comparison, [whole_start, whole_end) does not.
    """
    start = 0
    end = key_count
    whole_start = 0
    whole_end = (key_count // KEY_BLOCK) * KEY_BLOCK
    if VARIANT.right_bound:
        end = tl.maximum(tl.minimum(end, query_start + QUERY_BLOCK + diagonal + right), 0)
        last_whole = tl.maximum(query_start + diagonal + right + 1, 0)
        whole_end = tl.minimum(whole_end, (last_whole // KEY_BLOCK) * KEY_BLOCK)
    if VARIANT.left_bound:
        first = tl.maximum(query_start + diagonal - left, 0)
        start = tl.minimum((first // KEY_BLOCK) * KEY_BLOCK, (end // KEY_BLOCK) * KEY_BLOCK)
        first_whole = tl.maximum(query_start + QUERY_BLOCK - 1 + diagonal - left, 0)
        whole_start = tl.minimum(tl.cdiv(first_whole, KEY_BLOCK), tl.cdiv(end, KEY_BLOCK)) * KEY_BLOCK
        whole_start = tl.maximum(whole_start, start)
        whole_end = tl.maximum(whole_end, whole_start)
    return start, whole_start, whole_end, end


@triton.jit
def query_range(
    key_start, query_count, left, right, diagonal,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """(start, whole_start, whole_end, end) of queries for one block of keys, all but `end` multiples of QUERY_BLOCK.

    Rows past `query_count` count as whole: their saved log-sum-exp reads as +inf, so that P is 0. Keys past the end
    are whole as well: what they gather is never stored.
    """
    start = 0
    end = query_count
    whole_start = 0
    whole_end = tl.cdiv(query_count, QUERY_BLOCK) * QUERY_BLOCK
    if VARIANT.left_bound:
        end = tl.maximum(tl.minimum(end, key_start + KEY_BLOCK - diagonal + left), 0)
        last_whole = tl.maximum(key_start - diagonal + left + 1, 0)
        whole_end = tl.minimum(whole_end, (last_whole // QUERY_BLOCK) * QUERY_BLOCK)
    if VARIANT.right_bound:
        first = tl.maximum(key_start - diagonal - right, 0)
        start = tl.minimum((first // QUERY_BLOCK) * QUERY_BLOCK, tl.cdiv(end, QUERY_BLOCK) * QUERY_BLOCK)
        first_whole = tl.maximum(key_start + KEY_BLOCK - 1 - diagonal - right, 0)
        whole_start = tl.minimum(tl.cdiv(first_whole, QUERY_BLOCK), tl.cdiv(end, QUERY_BLOCK)) * QUERY_BLOCK
        whole_start = tl.maximum(whole_start, start)
        whole_end = tl.maximum(whole_end, whole_start)
    return start, whole_start, whole_end, end
