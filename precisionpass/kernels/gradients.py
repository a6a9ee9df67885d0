"""One tile of the backward: P and dP in either orientation, and what they add, rows by keys to dQ, keys by rows to dK
and dV."""

import triton
import triton.language as tl

from precisionpass.kernels import dropout
from precisionpass.kernels.scores import LOG2_E, load_term, scores, shape_gradient
from precisionpass.kernels.tiles import load_statistic, load_tile


@triton.jit
def probabilities_and_gradient(
    left_key, right_key, left_value, right_value, query_index, key_index, key_start, shift, correction,
    bias, bias_strides, mask, mask_strides, seed, batch_head,
    query_count, key_count, left, right, diagonal, numbers,
    batch, query_start, held, crosses, VARIANT: tl.constexpr, CHECK: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """(Q K^T, P, P after dropout, dP, allowed) from two products; `shift` as `prepare_rows` left it, +inf gives P = 0.

    With a score expression its value and its slopes take the place of Q K^T.

    P after dropout lacks the factor 1 / (1 - p): it belongs to the sum, after the rounding to 16 bits.
    """
    if VARIANT.exact:
        product = tl.dot(left_key, right_key, input_precision="ieee")
        gradient = tl.dot(left_value, right_value, input_precision="ieee")
    else:
        product = tl.dot(left_key, right_key)
        gradient = tl.dot(left_value, right_value)
    values, allowed = scores(
        product, query_index, key_index, bias, bias_strides, mask, mask_strides,
        query_count, key_count, left, right, diagonal, numbers,
        batch, query_start, key_start, held, crosses, VARIANT, CHECK, GUARD,
    )  # fmt: skip
    if VARIANT.fused_scale:
        probabilities = tl.exp2(values * (numbers.scale * LOG2_E) - shift)
    elif VARIANT.corrected:
        probabilities = tl.exp2((values - shift) * LOG2_E - correction)
    else:
        probabilities = tl.exp2((values - shift) * LOG2_E)
    if VARIANT.score is not None:
        product = VARIANT.score(
            product * numbers.scale, query_index, key_index, query_count, key_count, numbers, GUARD
        )
    kept_probabilities = probabilities
    if VARIANT.probability_gradient == "dropped":
        gradient += arriving(query_index, key_index, query_count, key_count, numbers, GUARD)
    if VARIANT.dropout:
        kept = dropout.keep(
            seed, batch_head, query_index, key_start, query_count, key_count, numbers, VARIANT,
            query_index.numel, key_index.numel, query_index.shape[0] == 1,
        )  # fmt: skip
        kept_probabilities = tl.where(kept, probabilities, 0.0)
        gradient = tl.where(kept, gradient * dropout.keep_scale(numbers.dropout), 0.0)
    if VARIANT.probability_gradient == "softmax":
        gradient += arriving(query_index, key_index, query_count, key_count, numbers, GUARD)
    return product, probabilities, kept_probabilities, gradient, allowed


@triton.jit
def arriving(query_index, key_index, query_count, key_count, numbers, GUARD: tl.constexpr):
    """What arrives through the returned probabilities, a gradient of P."""
    strides, place = numbers.probability_strides, numbers.place
    plane = numbers.probability_gradient + place.batch.to(tl.int64) * strides.batch
    plane += place.head.to(tl.int64) * strides.head
    tile = load_term(plane, strides, query_index, key_index, query_count, key_count, 0.0, True, True, GUARD)
    return tile.to(tl.float32)


@triton.jit
def score_gradient(probabilities, gradient, delta, allowed, VARIANT: tl.constexpr):
    """dS = P * (dP - delta). In a dead row that is NaN by rule an excluded key still gets an exact zero."""
    slope = probabilities * (gradient - delta)
    if VARIANT.nan_by_key:
        slope = tl.where(allowed, slope, 0.0)
    return slope


@triton.jit
def product_gradient(slope, product, numbers, VARIANT: tl.constexpr, BY: tl.constexpr = 0):
    """The gradient by scale * q.k from dS, back through clip, softcap and score where they are on.

    BY: of a score expression, by what; 0 is scale * q.k, n + 1 is score input n.
    """
    if VARIANT.shaped:
        slope = shape_gradient(slope, product, numbers, VARIANT, BY)
    return slope


@triton.jit
def gather_rows(
    key_sum, value_sum, key_tile, value_tile, query_start, key_start, key_index,
    query, query_strides, output_gradient, gradient_strides, shift, delta, correction, padded_count,
    bias, bias_strides, mask, mask_strides, seed, batch, head, batch_head,
    query_count, key_count, left, right, diagonal, numbers,
    held, crosses, VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what QUERY_BLOCK rows from `query_start` on give to dK and dV of one key block."""
    query_tile = load_tile(
        query, query_strides, batch, head, query_start, query_count,
        QUERY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, not VARIANT.whole_queries,
    )  # fmt: skip
    query_index = query_start + tl.arange(0, QUERY_BLOCK)
    statistics = batch_head.to(tl.int64) * padded_count + query_index
    row_shift = load_statistic(shift + statistics, query_index < query_count, float("inf"), VARIANT.packed)
    gradient_tile = load_tile(
        output_gradient, gradient_strides, batch, head, query_start, query_count,
        QUERY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, not VARIANT.whole_queries,
    )  # fmt: skip
    row_delta = load_statistic(delta + statistics, query_index < query_count, 0.0, VARIANT.packed)
    row_correction = row_delta
    if VARIANT.corrected:
        row_correction = load_statistic(correction + statistics, query_index < query_count, 0.0, VARIANT.packed)
    product, probabilities, kept, gradient, allowed = probabilities_and_gradient(
        key_tile, tl.trans(query_tile), value_tile, tl.trans(gradient_tile),
        query_index[None, :], key_index[:, None], key_start, row_shift[None, :], row_correction[None, :],
        bias, bias_strides, mask, mask_strides, seed, batch_head,
        query_count, key_count, left, right, diagonal, numbers,
        batch, query_start, held, crosses, VARIANT, VARIANT.right_bound or VARIANT.left_bound, not VARIANT.whole_keys,
    )  # fmt: skip
    if VARIANT.exact:
        value_sum = tl.dot(kept, gradient_tile, value_sum, input_precision="ieee")
    else:
        value_sum = tl.dot(kept.to(query_tile.dtype), gradient_tile, value_sum)
    slope = score_gradient(probabilities, gradient, row_delta[None, :], allowed, VARIANT)
    slope = product_gradient(slope, product, numbers, VARIANT)
    if VARIANT.exact:
        key_sum = tl.dot(slope, query_tile, key_sum, input_precision="ieee")
    else:
        key_sum = tl.dot(slope.to(query_tile.dtype), query_tile, key_sum)
    return key_sum, value_sum


@triton.jit
def gather_keys(
    query_sum, row_sum, query_tile, gradient_tile, key_start, query_index, row_shift, row_delta, row_correction,
    key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, seed,
    batch, key_head, batch_head, query_count, key_count, left, right, diagonal, numbers,
    query_start, held, crosses, VARIANT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what KEY_BLOCK keys from `key_start` on give to dQ of one query block, and to its rowsum dS where wanted."""
    key_tile = load_tile(
        key, key_strides, batch, key_head, key_start, key_count,
        KEY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, not VARIANT.whole_keys,
    )  # fmt: skip
    value_tile = load_tile(
        value, value_strides, batch, key_head, key_start, key_count,
        KEY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, not VARIANT.whole_keys,
    )  # fmt: skip
    key_index = key_start + tl.arange(0, KEY_BLOCK)
    product, probabilities, _, gradient, allowed = probabilities_and_gradient(
        query_tile, tl.trans(key_tile), gradient_tile, tl.trans(value_tile),
        query_index[:, None], key_index[None, :], key_start, row_shift[:, None], row_correction[:, None],
        bias, bias_strides, mask, mask_strides, seed, batch_head,
        query_count, key_count, left, right, diagonal, numbers,
        batch, query_start, held, crosses, VARIANT, VARIANT.bounded, not VARIANT.whole_keys,
    )  # fmt: skip
    slope = score_gradient(probabilities, gradient, row_delta[:, None], allowed, VARIANT)
    if VARIANT.row_sums:
        row_sum += tl.sum(slope, 1)
    slope = product_gradient(slope, product, numbers, VARIANT)
    if VARIANT.exact:
        query_sum = tl.dot(slope, key_tile, query_sum, input_precision="ieee")
    else:
        query_sum = tl.dot(slope.to(query_tile.dtype), key_tile, query_sum)
    return query_sum, row_sum
