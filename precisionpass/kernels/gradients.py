"""P and dP of one tile of the backward, in either orientation: rows by keys for dQ, keys by rows for dK and dV."""

import triton
import triton.language as tl

from precisionpass.kernels import dropout
from precisionpass.kernels.scores import LOG2_E, scores, shape_gradient


@triton.jit
def probabilities_and_gradient(
    left_key, right_key, left_value, right_value, query_index, key_index, key_start, shift, correction,
    bias, bias_strides, mask, mask_strides, seed, batch_head,
    query_count, key_count, left, right, diagonal, numbers,
    batch, query_start, kind, crosses, VARIANT: tl.constexpr, CHECK: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """(Q K^T, P, P after dropout, dP, allowed) from two products; `shift` as `prepare_rows` left it, +inf gives P = 0.

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
        batch, query_start, key_start, kind, crosses, VARIANT, CHECK, GUARD,
    )  # fmt: skip
    if VARIANT.fused_scale:
        probabilities = tl.exp2(values * (numbers.scale * LOG2_E) - shift)
    elif VARIANT.bias:
        probabilities = tl.exp2((values - shift) * LOG2_E - correction)
    else:
        probabilities = tl.exp2((values - shift) * LOG2_E)
    kept_probabilities = probabilities
    if VARIANT.dropout:
        kept = dropout.keep(
            seed, batch_head, query_index, key_start, query_count, key_count, numbers.dropout,
            query_index.numel, key_index.numel, query_index.shape[0] == 1,
        )  # fmt: skip
        kept_probabilities = tl.where(kept, probabilities, 0.0)
        gradient = tl.where(kept, gradient * dropout.keep_scale(numbers.dropout), 0.0)
    return product, probabilities, kept_probabilities, gradient, allowed


@triton.jit
def score_gradient(probabilities, gradient, delta, allowed, VARIANT: tl.constexpr):
    """dS = P * (dP - delta). In a dead row that is NaN by rule an excluded key still gets an exact zero."""
    slope = probabilities * (gradient - delta)
    if VARIANT.dead_rows_nan:
        slope = tl.where(allowed, slope, 0.0)
    return slope


@triton.jit
def product_gradient(slope, product, numbers, VARIANT: tl.constexpr):
    """The gradient by scale * q.k from dS, back through clip and softcap where they are on."""
    if VARIANT.softcap or VARIANT.logit_clip != "none":
        slope = shape_gradient(slope, product, numbers, VARIANT)
    return slope
