"""The backward as two kernels without atomics, so that every bit repeats: dK and dV by key blocks, dQ by query blocks.

    P = exp(S - lse)      dP = dO V^T      dS = P * (dP - delta)
    dV = P^T dO           dK = scale * dS^T Q           dQ = scale * dS K

Scores are recomputed in both. dK and dV work on transposed tiles, K Q^T, so that P^T and dS^T feed the tensor cores
from registers.
"""

import triton
import triton.language as tl

from precisionpass.kernels import attention_rows, dropout, sequences
from precisionpass.kernels.gradients import gather_keys, gather_rows
from precisionpass.kernels.mask_survey import held_by, narrowed
from precisionpass.kernels.masks import key_range, query_range
from precisionpass.kernels.tiles import load_statistic, load_tile, store_tile
from precisionpass.kernels.variant import Place, Placed

# `padded_count`, the rows of the statistics, is specialised: a multiple of 128, so that their loads are wide.
LENGTHS = ["heads", "group", "query_count", "key_count", "left", "right", "diagonal"]


@triton.jit(do_not_specialize=LENGTHS)
def key_value_gradients(
    query, query_strides, key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, survey, seed,
    output_gradient, gradient_strides, shift, delta, correction, padded_count, dead_heads,
    key_gradient, key_gradient_strides, value_gradient, value_gradient_strides,
    heads, group, query_count, key_count, left, right, diagonal, numbers,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEY_BLOCK keys of one key head, summed over the query heads that share it, in their order."""
    WIDTH: tl.constexpr = VARIANT.width
    VALUE_WIDTH: tl.constexpr = VARIANT.value_width
    blocks = sequences.blocks(key_count, KEY_BLOCK, numbers, VARIANT)
    key_heads = heads // group
    batch, key_head, block = sequences.of_program(blocks, key_heads, numbers, VARIANT)
    total_rows, total_keys = query_count, key_count
    sequence, block, first_row, query_count, first_key, key_count, diagonal = sequences.of_keys(
        batch, block, total_rows, total_keys, diagonal, numbers, KEY_BLOCK, VARIANT
    )
    query, key, value = sequences.inputs_at(
        query, query_strides, key, key_strides, value, value_strides, first_row, first_key, VARIANT
    )
    if VARIANT.packed:
        if VARIANT.mask:
            mask = sequences.moved(mask, mask_strides, first_row, first_key)
        output_gradient = sequences.moved(output_gradient, gradient_strides, first_row, 0)
        key_gradient = sequences.moved(key_gradient, key_gradient_strides, first_key, 0)
        value_gradient = sequences.moved(value_gradient, value_gradient_strides, first_key, 0)
        shift, delta = shift + first_row, delta + first_row
        if VARIANT.corrected:
            correction += first_row
    key_start = block * KEY_BLOCK
    key_index = key_start + tl.arange(0, KEY_BLOCK)
    dropout_seed = 0
    if VARIANT.dropout:
        dropout_seed = tl.load(seed)
    key_tile = load_tile(
        key, key_strides, batch, key_head, key_start, key_count,
        KEY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, not VARIANT.whole_keys,
    )  # fmt: skip
    value_tile = load_tile(
        value, value_strides, batch, key_head, key_start, key_count,
        KEY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, not VARIANT.whole_keys,
    )  # fmt: skip
    key_sum = tl.zeros([KEY_BLOCK, WIDTH], tl.float32)
    value_sum = tl.zeros([KEY_BLOCK, VALUE_WIDTH], tl.float32)
    start, whole_start, whole_end, end = query_range(
        key_start, query_count, left, right, diagonal, QUERY_BLOCK, KEY_BLOCK, VARIANT
    )
    if VARIANT.surveyed:
        survey, start, end = narrowed(
            survey, mask_strides, batch, block, blocks, query_count, start, end, KEY_BLOCK, QUERY_BLOCK,
        )  # fmt: skip
    for member in range(group if VARIANT.grouped else 1):
        head = key_head * group + member
        batch_head = batch * heads + head
        here = numbers
        if VARIANT.placed:
            here = Placed(*numbers, Place(sequence, batch, head, first_row, first_key, total_rows, total_keys))
        head_bias, head_mask = bias, mask
        if VARIANT.bias:
            head_bias = sequences.plane_of(bias, bias_strides, batch, head)
        if VARIANT.mask:
            head_mask = sequences.plane_of(mask, mask_strides, batch, head)
        for phase in tl.static_range(2 if VARIANT.apart else 1):
            crosses = phase == 0
            first = start
            final = end
            if VARIANT.apart and phase == 0:
                final = whole_start
            elif VARIANT.apart:
                first = whole_start
            held = held_by(survey, first // QUERY_BLOCK, QUERY_BLOCK, VARIANT)
            for query_start in tl.range(first, final, QUERY_BLOCK):
                next_held = held_by(survey, query_start // QUERY_BLOCK + 1, QUERY_BLOCK, VARIANT)  # ahead
                if not VARIANT.apart:
                    crosses = (query_start < whole_start) | (query_start >= whole_end)
                key_sum, value_sum = gather_rows(
                    key_sum, value_sum, key_tile, value_tile, query_start, key_start, key_index,
                    query, query_strides, output_gradient, gradient_strides, shift, delta, correction, padded_count,
                    head_bias, bias_strides, head_mask, mask_strides, dropout_seed, batch, head, batch_head,
                    query_count, key_count, left, right, diagonal, here, held, crosses, VARIANT, QUERY_BLOCK,
                )  # fmt: skip
                held = next_held
        if VARIANT.dead_rows_nan:
            # P of a dead row is NaN for every key, also for those of skipped blocks.
            value_sum = tl.where(tl.load(dead_heads + batch_head) > 0, float("nan"), value_sum)
    if VARIANT.dropout:
        value_sum = value_sum * dropout.keep_scale(numbers.dropout)
    store_tile(
        key_gradient, key_gradient_strides, batch, key_head, key_start, key_count,
        (key_sum * numbers.scale).to(key_tile.dtype),
        KEY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors,
    )  # fmt: skip
    store_tile(
        value_gradient, value_gradient_strides, batch, key_head, key_start, key_count, value_sum.to(key_tile.dtype),
        KEY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors,
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    query, query_strides, key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, survey, seed,
    output_gradient, gradient_strides, shift, delta, correction, padded_count, row_sums, row_sizes,
    output, residual, output_strides, log_sum_exp, log_sum_gradient, query_gradient, query_gradient_strides,
    heads, group, query_count, key_count, left, right, diagonal, numbers,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """dQ of QUERY_BLOCK rows of one head; with `makes_rows` their delta and shift too, for the kernel of dK and dV."""
    WIDTH: tl.constexpr = VARIANT.width
    blocks = sequences.blocks(query_count, QUERY_BLOCK, numbers, VARIANT)
    batch, head, block = sequences.of_program(blocks, heads, numbers, VARIANT)
    batch_head = batch * heads + head
    if VARIANT.right_bound and not VARIANT.packed:
        block = blocks - 1 - block  # the longest rows first
    key_head = head
    if VARIANT.grouped:
        key_head = head // group
    total_rows, total_keys = query_count, key_count
    sequence, block, first_row, query_count, first_key, key_count, diagonal = sequences.of_rows(
        batch, block, total_rows, total_keys, diagonal, numbers, QUERY_BLOCK, VARIANT
    )
    query, key, value = sequences.inputs_at(
        query, query_strides, key, key_strides, value, value_strides, first_row, first_key, VARIANT
    )
    if VARIANT.packed:
        if VARIANT.mask:
            mask = sequences.moved(mask, mask_strides, first_row, first_key)
        output_gradient = sequences.moved(output_gradient, gradient_strides, first_row, 0)
        query_gradient = sequences.moved(query_gradient, query_gradient_strides, first_row, 0)
    if VARIANT.placed:
        numbers = Placed(*numbers, Place(sequence, batch, head, first_row, first_key, total_rows, total_keys))
    query_start = block * QUERY_BLOCK
    query_index = query_start + tl.arange(0, QUERY_BLOCK)
    statistics = batch_head.to(tl.int64) * padded_count + first_row + query_index
    if VARIANT.bias:
        bias = sequences.plane_of(bias, bias_strides, batch, head)
    if VARIANT.mask:
        mask = sequences.plane_of(mask, mask_strides, batch, head)
    dropout_seed = 0
    if VARIANT.dropout:
        dropout_seed = tl.load(seed)
    query_tile = load_tile(
        query, query_strides, batch, head, query_start, query_count,
        QUERY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, not VARIANT.whole_queries,
    )  # fmt: skip
    gradient_tile = load_tile(
        output_gradient, gradient_strides, batch, head, query_start, query_count,
        QUERY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors, not VARIANT.whole_queries,
    )  # fmt: skip
    if VARIANT.makes_rows:
        row_delta, row_size = attention_rows.row_delta(
            gradient_tile, output, residual, output_strides, log_sum_gradient, batch, head, batch_head, query_start,
            query_count, VARIANT, QUERY_BLOCK,
        )  # fmt: skip
        row_shift, dead = attention_rows.row_shift(
            log_sum_exp, batch_head, query_start, query_count, VARIANT, QUERY_BLOCK
        )
        row_delta = tl.where(dead, 0.0, row_delta)
        tl.store(shift + statistics, row_shift)
        tl.store(delta + statistics, row_delta)
        if VARIANT.row_sums:
            tl.store(row_sizes + statistics, row_size)
    else:
        inside = query_index < query_count
        row_shift = load_statistic(shift + statistics, inside, float("inf"), VARIANT.packed)
        row_delta = load_statistic(delta + statistics, inside, 0.0, VARIANT.packed)
    row_correction = row_delta
    if VARIANT.corrected:
        row_correction = load_statistic(correction + statistics, query_index < query_count, 0.0, VARIANT.packed)
    query_sum = tl.zeros([QUERY_BLOCK, WIDTH], tl.float32)
    row_sum = tl.zeros([QUERY_BLOCK], tl.float32)
    start, whole_start, whole_end, end = key_range(
        query_start, key_count, left, right, diagonal, QUERY_BLOCK, KEY_BLOCK, VARIANT
    )
    if VARIANT.surveyed:
        survey, start, end = narrowed(
            survey, mask_strides, batch, block, blocks, key_count, start, end, QUERY_BLOCK, KEY_BLOCK,
        )  # fmt: skip
    for phase in tl.static_range(2 if VARIANT.apart else 1):
        crosses = phase == 1
        first = start
        final = end
        if VARIANT.apart and phase == 0:
            final = whole_end
        elif VARIANT.apart:
            first = whole_end
        held = held_by(survey, first // KEY_BLOCK, KEY_BLOCK, VARIANT)
        for key_start in tl.range(first, final, KEY_BLOCK):
            next_held = held_by(survey, key_start // KEY_BLOCK + 1, KEY_BLOCK, VARIANT)
            if not VARIANT.apart:
                crosses = (key_start < whole_start) | (key_start >= whole_end)
            query_sum, row_sum = gather_keys(
                query_sum, row_sum, query_tile, gradient_tile, key_start, query_index,
                row_shift, row_delta, row_correction,
                key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, dropout_seed,
                batch, key_head, batch_head, query_count, key_count, left, right, diagonal, numbers,
                query_start, held, crosses, VARIANT, KEY_BLOCK,
            )  # fmt: skip
            held = next_held
    if VARIANT.row_sums:
        tl.store(row_sums + statistics, row_sum, mask=query_index < query_count)
    store_tile(
        query_gradient, query_gradient_strides, batch, head, query_start, query_count,
        (query_sum * numbers.scale).to(query_tile.dtype),
        QUERY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors,
    )  # fmt: skip
