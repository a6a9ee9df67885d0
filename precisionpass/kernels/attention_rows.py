"""What the backward needs of each row before it starts: delta, and the log-sum-exp in the units of the exponent.

    delta = rowsum(dO * O) - dlse                          O with its residual: the value before rounding (NUMERICS 3)
    delta = rowsum(P * dP) / rowsum(P) - dlse              `recompute`: no residual, one more pass over the keys
    dS    = P * (dP - delta)
"""

import triton
import triton.language as tl

from precisionpass.kernels import residual as residual_code
from precisionpass.kernels import sequences
from precisionpass.kernels.gradients import probabilities_and_gradient
from precisionpass.kernels.masks import key_range
from precisionpass.kernels.scores import LOG2_E
from precisionpass.kernels.tiles import load_statistic, load_tile
from precisionpass.kernels.variant import Place, Placed

LENGTHS = ["heads", "group", "query_count", "key_count", "left", "right", "diagonal"]
PRECISE_LOG_SUM = tl.constexpr(256.0)  # above it the spacing of FP32 passes 1e-5, a relative error of P


@triton.jit
def row_delta(
    gradient, output, residual, output_strides, log_sum_gradient, batch, head, batch_head, start, query_count,
    VARIANT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(rowsum(dO * O) - dlse, rowsum |dO * O|) of ROWS rows from `start` on, whose dO is `gradient`; 0 past the last.

    The second is only made where somebody reads it.
    """
    index = start + tl.arange(0, ROWS)
    value = load_tile(
        output, output_strides, batch, head, start, query_count,
        ROWS, VARIANT.value_dim, VARIANT.value_width, False, True,
    )  # fmt: skip
    if VARIANT.residual:
        steps = load_tile(
            residual, output_strides, batch, head, start, query_count,
            ROWS, VARIANT.value_dim, VARIANT.value_width, False, True,
        )  # fmt: skip
        precise = residual_code.decode(value, steps)
    else:
        precise = value.to(tl.float32)
    delta = tl.sum(precise * gradient.to(tl.float32), 1)
    # A product of its own: one that delta shared could not be fused into its sum, and recording would change bits.
    size = tl.sum(tl.abs(precise) * tl.abs(gradient.to(tl.float32)), 1)
    if VARIANT.log_sum_gradient:
        place = batch_head.to(tl.int64) * query_count + index
        delta -= tl.load(log_sum_gradient + place, mask=index < query_count, other=0.0)
    return delta, size


@triton.jit
def row_shift(log_sum_exp, batch_head, start, query_count, VARIANT: tl.constexpr, ROWS: tl.constexpr):
    """(what P = exp(S - lse) subtracts, in the units of its exponent, which rows are dead).

    +inf on dead rows, so that P is 0 there (NaN with `nan_by_key`), and past the last row: no kernel tests for the end.
    """
    index = start + tl.arange(0, ROWS)
    place = batch_head.to(tl.int64) * query_count + index
    log_sum = tl.load(log_sum_exp + place, mask=index < query_count, other=float("inf"))
    dead = log_sum == float("-inf")
    shift = log_sum
    if VARIANT.fused_scale:
        shift = log_sum * LOG2_E
    if VARIANT.nan_by_key:
        shift = tl.where(dead, float("nan"), shift)
    else:
        shift = tl.where(dead, float("inf"), shift)
    return shift, dead


@triton.jit(do_not_specialize=["heads", "query_count"])
def prepare_rows(
    output, residual, output_strides, output_gradient, gradient_strides, log_sum_exp, log_sum_gradient,
    delta, shift, correction, padded_count, dead_heads, heads, query_count, VARIANT: tl.constexpr, ROWS: tl.constexpr,
    WANTS_DELTA: tl.constexpr,
):  # fmt: skip
    """delta and shift for ROWS rows of one head, in memory of `padded_count` rows a head.

    Neighbouring programs take neighbouring heads: those are what stands side by side in memory.
    """
    blocks = padded_count // ROWS
    head = tl.program_id(0) % heads
    start = ((tl.program_id(0) // heads) % blocks) * ROWS
    batch = tl.program_id(0) // heads // blocks
    batch_head = batch * heads + head
    statistics = batch_head.to(tl.int64) * padded_count + start + tl.arange(0, ROWS)
    subtracted, dead = row_shift(log_sum_exp, batch_head, start, query_count, VARIANT, ROWS)
    tl.store(shift + statistics, subtracted)
    if VARIANT.dead_rows_nan:
        tl.atomic_max(dead_heads + batch_head, tl.max(dead.to(tl.int32), 0))
    if VARIANT.corrected:
        tl.store(correction + statistics, tl.zeros([ROWS], tl.float32))
    if WANTS_DELTA:
        gradient = load_tile(
            output_gradient, gradient_strides, batch, head, start, query_count,
            ROWS, VARIANT.value_dim, VARIANT.value_width, False, True,
        )  # fmt: skip
        found, _ = row_delta(
            gradient, output, residual, output_strides, log_sum_gradient, batch, head, batch_head, start, query_count,
            VARIANT, ROWS,
        )  # fmt: skip
        tl.store(delta + statistics, tl.where(dead, 0.0, found))
    else:
        tl.store(delta + statistics, tl.zeros([ROWS], tl.float32))  # finite in the padding too, where P = 0


@triton.jit(do_not_specialize=LENGTHS)
def revisit_rows(
    query, query_strides, key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides,
    sinks, sinks_strides, seed, output_gradient, gradient_strides, log_sum_gradient,
    delta, shift, correction, padded_count, heads, group, query_count, key_count, left, right, diagonal, numbers,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, WANTS_DELTA: tl.constexpr,
):  # fmt: skip
    """One more pass over the keys of QUERY_BLOCK rows, for delta by recomputation and for exact normalisers.

    A row whose keys all carry a fill of finfo.min or -1e4 has a log-sum-exp that FP32 cannot tell from its maximum.
    `correction` = log2 rowsum exp(S - lse) puts that right; rows of ordinary size keep 0 and cost nothing.
    """
    blocks = sequences.blocks(query_count, QUERY_BLOCK, numbers, VARIANT)
    batch, head, block = sequences.of_program(blocks, heads, numbers, VARIANT)
    batch_head = batch * heads + head
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
        shift, delta = shift + first_row, delta + first_row
        if VARIANT.corrected:
            correction += first_row
        if VARIANT.sinks:
            sinks = sequences.moved(sinks, sinks_strides, first_row, 0)
        if VARIANT.log_sum_gradient:
            log_sum_gradient += first_row
    if VARIANT.placed:
        numbers = Placed(*numbers, Place(sequence, batch, head, first_row, first_key, total_rows, total_keys))
    query_start = block * QUERY_BLOCK
    query_index = query_start + tl.arange(0, QUERY_BLOCK)
    inside = query_index < query_count
    statistics = batch_head.to(tl.int64) * padded_count + query_index
    subtracted = load_statistic(shift + statistics, inside, float("inf"), VARIANT.packed)
    sizes = tl.where(subtracted == float("inf"), 0.0, tl.abs(subtracted))
    large = (sizes > PRECISE_LOG_SUM) & VARIANT.corrected
    weight = tl.zeros([QUERY_BLOCK], tl.float32)
    weighted = tl.zeros([QUERY_BLOCK], tl.float32)
    if WANTS_DELTA or tl.max(large.to(tl.int32), 0) > 0:
        if VARIANT.bias:
            bias = sequences.plane_of(bias, bias_strides, batch, head)
        if VARIANT.mask:
            mask = sequences.plane_of(mask, mask_strides, batch, head)
        dropout_seed = 0
        if VARIANT.dropout:
            dropout_seed = tl.load(seed)
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
        for key_start in tl.range(start, end, KEY_BLOCK):
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
                subtracted[:, None], 0.0, bias, bias_strides, mask, mask_strides, dropout_seed, batch_head,
                query_count, key_count, left, right, diagonal, numbers,
                batch, query_start, None, True, VARIANT, True, True,
            )  # fmt: skip
            weight += tl.sum(probabilities, 1)
            weighted += tl.sum(probabilities * gradient, 1)
        if VARIANT.sinks:
            # The sink holds a share of the row, and its value, so its gradient, is zero.
            row = sinks + batch.to(tl.int64) * sinks_strides.batch + head.to(tl.int64) * sinks_strides.head
            sink = tl.load(row + query_index.to(tl.int64) * sinks_strides.row, mask=inside, other=0.0).to(tl.float32)
            log_sum = subtracted
            if VARIANT.fused_scale:
                log_sum = subtracted / LOG2_E
            weight += tl.exp2((sink - log_sum) * LOG2_E)
    if VARIANT.corrected:
        found = tl.where(large & (weight > 0.0), tl.log2(weight), 0.0)
        if VARIANT.packed:
            tl.store(correction + statistics, found, mask=inside)
        else:
            tl.store(correction + statistics, found)
    if WANTS_DELTA:
        found = weighted / tl.where(weight > 0.0, weight, 1.0)
        if VARIANT.log_sum_gradient:
            unpadded = batch_head.to(tl.int64) * total_rows + query_index
            found -= tl.load(log_sum_gradient + unpadded, mask=inside, other=0.0)
        if VARIANT.packed:
            tl.store(delta + statistics, found, mask=inside)
        else:
            tl.store(delta + statistics, found)
