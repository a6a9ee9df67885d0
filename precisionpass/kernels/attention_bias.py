"""The gradient of a tensor that the scores read, summed over the axes along which it is broadcast, in a fixed order.

    dbias = sum dS      dt = sum dS * (d clip(softcap(score)) / d score) * (d score / dt) for a score input t
"""

import triton
import triton.language as tl

from precisionpass.kernels import sequences
from precisionpass.kernels.gradients import probabilities_and_gradient, product_gradient, score_gradient
from precisionpass.kernels.masks import key_range
from precisionpass.kernels.tiles import load_tile
from precisionpass.kernels.variant import Place, Placed

LENGTHS = [
    "heads", "group", "query_count", "key_count", "left", "right", "diagonal", "bias_heads", "batch_span", "head_span",
]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def bias_gradients(
    query, query_strides, key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, seed,
    output_gradient, gradient_strides, shift, delta, correction, padded_count, bias_gradient,
    heads, group, query_count, key_count, left, right, diagonal, numbers, bias_heads, batch_span, head_span,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
    BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, INPUT: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient, FP32, contiguous in the tensor's own shape: of score input INPUT, of the bias where -1.

    The program owns its tile and walks over `batch_span` sequences, `head_span` heads and, where the tensor does not
    vary along them, all rows or all keys: no atomics, so the sum repeats bitwise, and no [B, H, Sq, Sk] is made.
    """
    row_tiles = tl.cdiv(query_count, QUERY_BLOCK)
    key_tiles = tl.cdiv(key_count, KEY_BLOCK)
    own_row_tiles = 1
    own_key_tiles = 1
    if BY_QUERY:
        own_row_tiles = row_tiles
    if BY_KEY:
        own_key_tiles = key_tiles
    program = tl.program_id(0)
    own_key = program % own_key_tiles
    own_row = (program // own_key_tiles) % own_row_tiles
    plane = program // own_key_tiles // own_row_tiles
    first_batch = plane // bias_heads
    first_head = plane % bias_heads
    dropout_seed = 0
    if VARIANT.dropout:
        dropout_seed = tl.load(seed)
    total = tl.zeros([QUERY_BLOCK, KEY_BLOCK], tl.float32)
    first_row, last_row = 0, row_tiles
    if BY_QUERY:
        first_row, last_row = own_row, own_row + 1
    for member in range(batch_span * head_span):
        batch = first_batch + member // head_span
        head = first_head + member % head_span
        batch_head = batch * heads + head
        key_head = head // group
        here = numbers
        if VARIANT.placed:
            here = Placed(*numbers, Place(batch, batch, head, 0, 0, query_count, key_count))
        head_bias, head_mask = bias, mask
        if VARIANT.bias:
            head_bias = sequences.plane_of(bias, bias_strides, batch, head)
        if VARIANT.mask:
            head_mask = sequences.plane_of(mask, mask_strides, batch, head)
        for row_tile in range(first_row, last_row):
            query_start = row_tile * QUERY_BLOCK
            query_index = query_start + tl.arange(0, QUERY_BLOCK)
            statistics = batch_head.to(tl.int64) * padded_count + query_index
            row_shift = tl.load(shift + statistics)
            row_delta = tl.load(delta + statistics)
            row_correction = row_delta
            if VARIANT.corrected:
                row_correction = tl.load(correction + statistics)
            query_tile = load_tile(
                query, query_strides, batch, head, query_start, query_count,
                QUERY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, True,
            )  # fmt: skip
            gradient_tile = load_tile(
                output_gradient, gradient_strides, batch, head, query_start, query_count,
                QUERY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, True,
            )  # fmt: skip
            start, whole_start, whole_end, end = key_range(
                query_start, key_count, left, right, diagonal, QUERY_BLOCK, KEY_BLOCK, VARIANT
            )
            if BY_KEY:
                start = tl.maximum(start, own_key * KEY_BLOCK)
                end = tl.minimum(end, (own_key + 1) * KEY_BLOCK)
            for key_start in range(start, end, KEY_BLOCK):
                key_tile = load_tile(
                    key, key_strides, batch, key_head, key_start, key_count,
                    KEY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, True,
                )  # fmt: skip
                value_tile = load_tile(
                    value, value_strides, batch, key_head, key_start, key_count,
                    KEY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, True,
                )  # fmt: skip
                product, probabilities, kept, gradient, allowed = probabilities_and_gradient(
                    query_tile, tl.trans(key_tile), gradient_tile, tl.trans(value_tile),
                    query_index[:, None], (key_start + tl.arange(0, KEY_BLOCK))[None, :], key_start,
                    row_shift[:, None], row_correction[:, None], head_bias, bias_strides, head_mask, mask_strides,
                    dropout_seed, batch_head, query_count, key_count, left, right, diagonal, here,
                    batch, query_start, None, True, VARIANT, True, True,
                )  # fmt: skip
                slope = score_gradient(probabilities, gradient, row_delta[:, None], allowed, VARIANT)
                if INPUT >= 0:
                    slope = product_gradient(slope, product, numbers, VARIANT, 1 + INPUT)
                total += slope

    rows = own_row * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    keys = own_key * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    if BY_QUERY and BY_KEY:
        target = bias_gradient + plane.to(tl.int64) * query_count * key_count
        place = rows.to(tl.int64)[:, None] * key_count + keys[None, :]
        tl.store(target + place, total, mask=(rows[:, None] < query_count) & (keys[None, :] < key_count))
    elif BY_QUERY:
        target = bias_gradient + plane.to(tl.int64) * query_count
        tl.store(target + rows, tl.sum(total, 1), mask=rows < query_count)
    elif BY_KEY:
        target = bias_gradient + plane.to(tl.int64) * key_count
        tl.store(target + keys, tl.sum(total, 0), mask=keys < key_count)
    else:
        tl.store(bias_gradient + plane, tl.sum(tl.sum(total, 1), 0))
