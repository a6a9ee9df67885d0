"""One step of the online softmax with a consistent normaliser, and its end (NUMERICS 3).

    m_new = max(m, rowmax S)                  shift = m_new, 0 where m_new is -inf
    P     = exp(S - shift);  Pb = round(P)    alpha = exp(m - shift)
    l     = l*alpha + sum(Pb)                 the sum of the P that multiplies V
    acc   = acc*alpha + Pb @ V
"""

import triton
import triton.language as tl

from precisionpass.kernels import dropout, fp8, shifts
from precisionpass.kernels.scores import LN_2, LOG2_E, exponential, scores
from precisionpass.kernels.tiles import load_tile


@triton.jit
def absorb(
    state, query_tile, key_start,
    key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, seed,
    batch, batch_head, key_head, query_index, query_count, key_count, left, right, diagonal, numbers,
    query_start, held, crosses, VARIANT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Take KEY_BLOCK keys from `key_start` on into the state.

    Tensor cores truncate when they add, so a long sum of one sign drifts by a fraction of an ulp for every 16 keys: the
    normaliser and the output by different ones, which is a bias of delta. With `two_level` each block's products start
    from zero and are added by the CUDA cores, which round; with `deferred` one step later, beside the next Q K^T.
    """
    accumulator, pending, rescale, row_sum, precise_sum, row_max = state
    key_tile = load_tile(
        key, key_strides, batch, key_head, key_start, key_count,
        KEY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, not VARIANT.whole_keys,
    )  # fmt: skip
    if VARIANT.exact:
        product = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee")
    else:
        product = tl.dot(query_tile, tl.trans(key_tile))
    if VARIANT.qk_exponent > 0 and VARIANT.fp8_scale != "head":
        product = fp8.rescaled(product, key_start, numbers, VARIANT, KEY_BLOCK)
    if VARIANT.deferred:
        accumulator = tl.fma(accumulator, tl.broadcast_to(rescale[:, None], accumulator.shape), pending)
    key_index = key_start + tl.arange(0, KEY_BLOCK)
    values, _ = scores(
        product, query_index[:, None], key_index[None, :], bias, bias_strides, mask, mask_strides,
        query_count, key_count, left, right, diagonal, numbers,
        batch, query_start, key_start, held, crosses, VARIANT, VARIANT.bounded, not VARIANT.whole_keys,
    )  # fmt: skip

    if VARIANT.row_max_shift:
        old_shift = row_max[2]
        new_max = shifts.advance(row_max, values, numbers)
        new_shift = new_max[2]
    else:
        old_shift = row_max
        new_max = tl.maximum(row_max, tl.max(values, 1))
        new_shift = new_max
    shift = tl.where(new_shift == float("-inf"), 0.0, new_shift)  # a row without a key so far: never inf - inf
    if VARIANT.pv_exponent > 0:
        power = fp8.power_of(shift, numbers, VARIANT)
        probabilities = fp8.exponential(values, shift[:, None], power[:, None], numbers, VARIANT)
        rescale = tl.exp2(fp8.power_of(old_shift, numbers, VARIANT) - power)
        rounded = fp8.grouped(probabilities.to(VARIANT.probability_dtype))
    else:
        probabilities = exponential(values, shift[:, None], numbers, VARIANT)
        rescale = exponential(old_shift, shift, numbers, VARIANT)
        rounded = probabilities.to(VARIANT.probability_dtype)
    if VARIANT.rounded_normaliser and not VARIANT.exact:
        # A product with ones: the tensor cores are idle during the softmax, the CUDA cores are not.
        ONES_WIDTH: tl.constexpr = VARIANT.ones_width
        if VARIANT.pv_exponent > 0:
            ones = fp8.ones(KEY_BLOCK, ONES_WIDTH, rounded.dtype)
        else:
            ones = tl.full([KEY_BLOCK, ONES_WIDTH], 1.0, rounded.dtype)
        if VARIANT.two_level:
            row_sum = tl.fma(row_sum, tl.broadcast_to(rescale[:, None], row_sum.shape), tl.dot(rounded, ones))
        else:
            row_sum = tl.dot(rounded, ones, row_sum * rescale[:, None])
        if VARIANT.precise_log_sum:
            precise_sum = precise_sum * rescale + tl.sum(probabilities, 1)
    else:
        row_sum = row_sum * rescale + tl.sum(probabilities, 1)
    if VARIANT.dropout:
        kept = dropout.keep(
            seed, batch_head, query_index, key_start, query_count, key_count, numbers, VARIANT,
            query_index.shape[0], KEY_BLOCK, False,
        )  # fmt: skip
        if VARIANT.pv_exponent > 0:
            kept = fp8.grouped(kept)
        rounded = tl.where(kept, rounded, 0.0).to(rounded.dtype)
    if not VARIANT.two_level:
        accumulator = accumulator * rescale[:, None]
    if VARIANT.pv_exponent > 0:
        value_tile = fp8.load_turned(
            value, value_strides, batch, key_head, key_start, KEY_BLOCK, VARIANT.value_width, VARIANT.descriptors
        )
    else:
        value_tile = load_tile(
            value, value_strides, batch, key_head, key_start, key_count,
            KEY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, not VARIANT.whole_keys,
        )  # fmt: skip
    if VARIANT.exact:
        accumulator = tl.dot(rounded, value_tile, accumulator, input_precision="ieee")
    elif VARIANT.two_level:
        pending = tl.dot(rounded, value_tile)
        if VARIANT.pv_exponent > 0 and VARIANT.fp8_scale == "block":
            pending = pending * fp8.block_of_values(key_start, numbers)
        if not VARIANT.deferred:
            accumulator = tl.fma(accumulator, tl.broadcast_to(rescale[:, None], accumulator.shape), pending)
    elif VARIANT.pv_exponent > 0 and VARIANT.fp8_scale == "block":
        accumulator += tl.dot(rounded, value_tile) * fp8.block_of_values(key_start, numbers)
    else:
        accumulator = tl.dot(rounded, value_tile, accumulator)
    if not VARIANT.deferred:
        pending, rescale = state[1], state[2]
    return accumulator, pending, rescale, row_sum, precise_sum, new_max


@triton.jit
def bounded(output, limit):
    """output within +-limit; what is NaN stays NaN."""
    return tl.where(output > limit, limit, tl.where(output < -limit, -limit, output))


@triton.jit
def finish(accumulator, row_sum, precise_sum, row_max, sink, numbers, VARIANT: tl.constexpr):
    """(output FP32, log-sum-exp, true maximum in natural units); a row without a key is 0, or NaN by the rule.

    The log-sum-exp is that of the unrounded P, unless the variant takes it from the rounded sum (then both are one).
    A sink is one more logit whose value is zero: it joins the normaliser only, here, outside the loop.
    """
    row_shift = row_max
    if VARIANT.row_max_shift:
        row_max, _, row_shift = row_max
    if VARIANT.pv_exponent > 0:
        row_shift = fp8.natural(row_shift, fp8.power_of(row_shift, numbers, VARIANT), numbers, VARIANT)
    elif VARIANT.fused_scale:
        row_shift = row_shift * numbers.scale
    if VARIANT.fused_scale:
        row_max = row_max * numbers.scale
    total_max = row_shift
    if VARIANT.sinks:
        total_max = tl.maximum(row_shift, sink)
    shift = tl.where(total_max == float("-inf"), 0.0, total_max)
    if VARIANT.sinks:
        rescale = tl.exp2((row_shift - shift) * LOG2_E)
        held = tl.exp2((sink - shift) * LOG2_E + VARIANT.pv_exponent)
        row_sum = row_sum * rescale + held
        precise_sum = precise_sum * rescale + held
        accumulator = accumulator * rescale[:, None]
    dead = row_max == float("-inf")
    empty = row_sum == 0.0
    factor = 1.0 / tl.where(empty, 1.0, row_sum)
    if VARIANT.dropout:
        factor = factor * dropout.keep_scale(numbers.dropout)
    output = accumulator * factor[:, None]
    if VARIANT.dead_rows:
        output = tl.where(dead[:, None], 0.0, output)
    if VARIANT.dead_rows_nan:
        output = tl.where(empty[:, None], float("nan"), output)
    if VARIANT.output_clip:
        output = bounded(output, numbers.output_limit)
    log_sum = tl.where(empty, float("-inf"), shift + tl.log(precise_sum) - VARIANT.pv_exponent * LN_2)
    return output, log_sum, row_max
