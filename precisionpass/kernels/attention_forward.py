"""The forward kernel: O = softmax(S) V with a consistent normaliser, the int8 residual and the log-sum-exp."""

import triton
import triton.language as tl

from precisionpass.kernels import fp8, sequences, shifts
from precisionpass.kernels import residual as residual_code
from precisionpass.kernels.mask_survey import held_by, narrowed
from precisionpass.kernels.masks import key_range
from precisionpass.kernels.online_softmax import absorb, finish
from precisionpass.kernels.tiles import load_tile, store_tile
from precisionpass.kernels.variant import Magnitudes, Numbers, Place, Placed

LENGTHS = ["heads", "group", "query_count", "key_count", "left", "right", "diagonal", "splits"]


@triton.jit(do_not_specialize=LENGTHS)
def attention_forward(
    query, query_strides, key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides,
    survey, sinks, sinks_strides, seed, output, output_strides, residual, residual_strides, log_sum_exp, maximum,
    heads, group, query_count, key_count, left, right, diagonal, numbers, splits,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program makes QUERY_BLOCK rows of one head; with `split`, of one part of its keys, for `combine_splits`.

        S = clip(softcap(scale * Q K^T)) + bias      -inf where excluded
        O = round(P V / l)      residual = P V / l - O in 254ths of an ulp      lse = m + log l
    """
    VALUE_WIDTH: tl.constexpr = VARIANT.value_width
    ONES_WIDTH: tl.constexpr = VARIANT.ones_width
    blocks = sequences.blocks(query_count, QUERY_BLOCK, numbers, VARIANT)
    batch, head, block = sequences.of_program(blocks, heads * splits, numbers, VARIANT)
    split = 0
    if VARIANT.split:
        split = head % splits
        head = head // splits
    batch_head = batch * heads + head
    if VARIANT.right_bound and not VARIANT.packed:
        block = blocks - 1 - block  # the longest rows first: they set the time of the last wave
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
        output = sequences.moved(output, output_strides, first_row, 0)
        log_sum_exp += first_row
        if VARIANT.residual:
            residual = sequences.moved(residual, residual_strides, first_row, 0)
        if VARIANT.row_max:
            maximum += first_row
        if VARIANT.sinks:
            sinks = sequences.moved(sinks, sinks_strides, first_row, 0)
    query_start = block * QUERY_BLOCK
    if VARIANT.qk_exponent + VARIANT.pv_exponent > 0:
        whole, query_scale, key_scales, value_scales, value_scale = fp8.scales(
            numbers.magnitudes, batch_head, batch * (heads // group) + key_head, query_start, query_count, key_count,
            VARIANT, QUERY_BLOCK,
        )  # fmt: skip
        numbers = Numbers(
            numbers.scale * whole, *numbers[1:-1], Magnitudes(query_scale, key_scales, value_scales)
        )
    if VARIANT.placed:
        numbers = Placed(*numbers, Place(sequence, batch, head, first_row, first_key, total_rows, total_keys))
    query_index = query_start + tl.arange(0, QUERY_BLOCK)
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
    accumulator = tl.zeros([QUERY_BLOCK, VALUE_WIDTH], tl.float32)
    row_max = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    if VARIANT.row_max_shift:
        row_max = shifts.start(QUERY_BLOCK)
    precise_sum = tl.zeros([QUERY_BLOCK], tl.float32)
    if VARIANT.rounded_normaliser and not VARIANT.exact:
        row_sum = tl.zeros([QUERY_BLOCK, ONES_WIDTH], tl.float32)
    else:
        row_sum = tl.zeros([QUERY_BLOCK], tl.float32)

    # Of `deferred`: the last block's product, and the factor that the sum before it still has to take.
    pending = tl.zeros([QUERY_BLOCK, VALUE_WIDTH if VARIANT.deferred else 16], tl.float32)
    rescale = tl.zeros([QUERY_BLOCK], tl.float32)
    state = accumulator, pending, rescale, row_sum, precise_sum, row_max
    start, whole_start, whole_end, end = key_range(
        query_start, key_count, left, right, diagonal, QUERY_BLOCK, KEY_BLOCK, VARIANT
    )
    if VARIANT.surveyed:
        survey, start, end = narrowed(
            survey, mask_strides, batch, block, blocks, key_count, start, end, QUERY_BLOCK, KEY_BLOCK,
        )  # fmt: skip
    if VARIANT.split:
        span = tl.cdiv(tl.cdiv(end - start, KEY_BLOCK), splits) * KEY_BLOCK
        start += split * span
        end = tl.minimum(end, start + span)
    held = held_by(survey, start // KEY_BLOCK, KEY_BLOCK, VARIANT)
    for key_start in tl.range(start, end, KEY_BLOCK):
        next_held = held_by(survey, key_start // KEY_BLOCK + 1, KEY_BLOCK, VARIANT)  # ahead
        state = absorb(
            state, query_tile, key_start,
            key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides, dropout_seed,
            batch, batch_head, key_head, query_index, query_count, key_count, left, right, diagonal, numbers,
            query_start, held, (key_start < whole_start) | (key_start >= whole_end), VARIANT, KEY_BLOCK,
        )  # fmt: skip
        held = next_held

    accumulator, pending, rescale, row_sum, precise_sum, row_max = state
    if VARIANT.deferred:
        accumulator = tl.fma(accumulator, tl.broadcast_to(rescale[:, None], accumulator.shape), pending)
    if VARIANT.rounded_normaliser and not VARIANT.exact:
        row_sum = tl.max(row_sum, 1)  # every column holds the same sum
        if not VARIANT.precise_log_sum:
            precise_sum = row_sum
    else:
        precise_sum = row_sum
    if VARIANT.pv_exponent > 0 and VARIANT.fp8_scale != "block":
        accumulator = accumulator * value_scale
    row_inside = query_index < query_count
    sink = 0.0
    if VARIANT.sinks:
        sink_row = sinks + batch.to(tl.int64) * sinks_strides.batch + head.to(tl.int64) * sinks_strides.head
        sink = tl.load(sink_row + query_index.to(tl.int64) * sinks_strides.row, mask=row_inside, other=0.0)
        sink = sink.to(tl.float32)
    precise, log_sum, natural_max = finish(accumulator, row_sum, precise_sum, row_max, sink, numbers, VARIANT)

    part = batch_head
    if VARIANT.split:
        part = batch_head * splits + split
        head = head * splits + split
    statistics = part.to(tl.int64) * total_rows + query_index
    tl.store(log_sum_exp + statistics, log_sum, mask=row_inside)
    if VARIANT.row_max:
        tl.store(maximum + statistics, natural_max, mask=row_inside)
    if VARIANT.split:
        rounded = precise
    else:
        rounded = precise.to(VARIANT.dtype)
    store_tile(
        output, output_strides, batch, head, query_start, query_count, rounded,
        QUERY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.descriptors and not VARIANT.split,
    )  # fmt: skip
    if VARIANT.residual:
        lost = residual_code.encode(precise, rounded, statistics[:, None], tl.arange(0, VARIANT.value_width)[None, :])
        store_tile(
            residual, residual_strides, batch, head, query_start, query_count, lost,
            QUERY_BLOCK, VARIANT.value_dim, VARIANT.value_width, VARIANT.residual_descriptor,
        )  # fmt: skip
