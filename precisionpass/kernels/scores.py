"""From a tile of Q K^T to a tile of scores, and the derivative back; either orientation, since all shapes broadcast.

S = clip(softcap(score(scale * q.k))) + bias, -inf where the mask or the bounds exclude a key. With `fused_scale` they
stay in units of q.k and the scale joins the exponent, one multiplication less for each score.
"""

import triton
import triton.language as tl

from precisionpass.kernels import masks
from precisionpass.kernels.mask_survey import EVERYTHING, allowed_by

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh to a few units of FP32 everywhere: a series near 0, where the exponential form cancels."""
    y = x * x
    series = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 - y * 0.05396825397)))
    root = tl.math.rsqrt(tl.exp2(x * (2.0 * LOG2_E)) + 1.0)  # 1 / z by its root: one instruction, a division takes six
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - 2.0 * root * root)


@triton.jit
def load_term(
    term, strides, query_index, key_index, query_count, key_count, other,
    BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """A mask or bias at (query_index, key_index); an axis that it does not vary along is loaded once and broadcast.

    Rows past the end read the last one, and keys are tested in the last block alone: a tested load is a narrow one.
    """
    pointers = term
    if BY_QUERY:
        pointers += tl.minimum(query_index, query_count - 1).to(tl.int64) * strides.row
    if BY_KEY:
        pointers += key_index * strides.column
    if BY_KEY and GUARD:
        tile = tl.load(pointers, mask=tl.broadcast_to(key_index < key_count, pointers.shape), other=other)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_input(
    source, place, query_index, key_index, query_count, key_count,
    BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """A tensor that the score expression reads, (pointer, strides), in its own format."""
    term, strides = source
    term += place.batch.to(tl.int64) * strides.batch + place.head.to(tl.int64) * strides.head
    if BY_QUERY:
        term += tl.cast(place.first_row, tl.int64) * strides.row
    if BY_KEY:
        term += tl.cast(place.first_key, tl.int64) * strides.column
    return load_term(term, strides, query_index, key_index, query_count, key_count, 0, BY_QUERY, BY_KEY, GUARD)


@triton.jit
def shape(scores, numbers, VARIANT: tl.constexpr):
    """clip(softcap(scores)) in FP32."""
    if VARIANT.softcap:
        scores = numbers.softcap * tanh(scores / numbers.softcap)
    if VARIANT.logit_clip == "hard":
        scores = tl.minimum(tl.maximum(scores, -numbers.logit_limit), numbers.logit_limit)
    if VARIANT.logit_clip == "tanh":
        scores = numbers.logit_limit * tanh(scores / numbers.logit_limit)
    return scores


@triton.jit
def shape_gradient(gradient, product, numbers, VARIANT: tl.constexpr, BY: tl.constexpr):
    """The gradient by scale * product, from the gradient by clip(softcap(score(scale * product))).

    With a score expression `product` is its value and its slopes: by scale * product, by the score inputs.
    """
    if VARIANT.score is not None:
        capped = product[0]
        gradient = gradient * product[1 + BY]
    else:
        capped = product * numbers.scale
    slope = 1.0
    if VARIANT.softcap:
        bent = tanh(capped / numbers.softcap)
        slope = 1.0 - bent * bent
        capped = numbers.softcap * bent
    if VARIANT.logit_clip == "hard":
        gradient = tl.where(tl.abs(capped) <= numbers.logit_limit, gradient, 0.0)
    if VARIANT.logit_clip == "tanh":
        bent = tanh(capped / numbers.logit_limit)
        gradient = gradient * (1.0 - bent * bent)
    if VARIANT.softcap:
        gradient = gradient * slope
    return gradient


@triton.jit
def scores(
    product, query_index, key_index, bias, bias_strides, mask, mask_strides,
    query_count, key_count, left, right, diagonal, numbers,
    batch_head, query_start, key_start, held, crosses, VARIANT: tl.constexpr, CHECK: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """(scores, allowed): natural units, or units of q.k with `fused_scale`; -inf where mask or bounds exclude a key.

    held: what the mask holds here, by `mask_survey`. CHECK: tiles may cross the bounds, and this one does where
    `crosses` holds. GUARD: keys of a tile may not exist.
    """
    if VARIANT.fused_scale:
        values = product
    else:
        values = product * numbers.scale
        if VARIANT.score is not None:
            found = VARIANT.score(values, query_index, key_index, query_count, key_count, numbers, GUARD)
            values = found[0]
        values = shape(values, numbers, VARIANT)
    if VARIANT.bias:
        values += load_term(
            bias, bias_strides, query_index, key_index, query_count, key_count, 0.0,
            VARIANT.bias_varies_by_query, VARIANT.bias_varies_by_key, GUARD,
        ).to(tl.float32)  # fmt: skip
    allowed = True
    if VARIANT.mask:
        if VARIANT.surveyed:
            allowed = allowed_by(held, product.shape[1])
        else:
            allowed = load_term(
                mask, mask_strides, query_index, key_index, query_count, key_count, 0,
                VARIANT.mask_varies_by_query, VARIANT.mask_varies_by_key, GUARD,
            ) != 0  # fmt: skip
        if VARIANT.branches_by_mask:
            if held[0] != EVERYTHING:
                values = tl.where(allowed, values, float("-inf"))
    if CHECK and VARIANT.nan_by_key:
        allowed = allowed & masks.inside(query_index, key_index, key_count, left, right, diagonal, VARIANT)
    if (VARIANT.mask and not VARIANT.branches_by_mask) or (CHECK and VARIANT.nan_by_key):
        values = tl.where(allowed, values, float("-inf"))
    if CHECK and not VARIANT.nan_by_key:
        if crosses:
            bounded = masks.inside(query_index, key_index, key_count, left, right, diagonal, VARIANT)
            values = tl.where(bounded, values, float("-inf"))
    return values, allowed


@triton.jit
def exponential(values, shift, numbers, VARIANT: tl.constexpr):
    """exp(values - shift) by exp2, `shift` in the units of `scores`.

    In natural units the subtraction comes first: a fill of finfo.min times log2(e) would overflow. With `fused_scale`
    it is one fused multiply-add; its rounding is a factor common to a row, which the normaliser cancels (NUMERICS 3).
    """
    if VARIANT.fused_scale:
        factor = numbers.scale * LOG2_E
        return tl.exp2(values * factor - shift * factor)
    else:
        return tl.exp2((values - shift) * LOG2_E)
