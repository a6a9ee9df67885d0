"""The probabilities themselves, where they are asked for: one kernel beside the forward, which never makes them.

m = rowmax S      l = sum exp(S - m)      P = exp(S - m) / l, FP32, rounded once        (with a sink in m and l)
"""

import triton
import triton.language as tl

from precisionpass.kernels import dropout, sequences
from precisionpass.kernels.masks import key_range
from precisionpass.kernels.scores import LOG2_E, scores
from precisionpass.kernels.tiles import load_tile
from precisionpass.kernels.variant import Place, Placed

LENGTHS = ["heads", "group", "query_count", "key_count", "left", "right", "diagonal"]


@triton.jit
def natural_scores(
    query_tile, query_start, key_start, query_index, key, key_strides, bias, bias_strides, mask, mask_strides,
    batch, key_head, query_count, key_count, left, right, diagonal, numbers,
    VARIANT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """[rows, KEY_BLOCK] scores of the keys from `key_start` on, in natural units, -inf where a key is excluded."""
    key_tile = load_tile(
        key, key_strides, batch, key_head, key_start, key_count,
        KEY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, True,
    )  # fmt: skip
    if VARIANT.exact:
        product = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee")
    else:
        product = tl.dot(query_tile, tl.trans(key_tile))
    values, _ = scores(
        product, query_index[:, None], (key_start + tl.arange(0, KEY_BLOCK))[None, :],
        bias, bias_strides, mask, mask_strides,
        query_count, key_count, left, right, diagonal, numbers,
        batch, query_start, key_start, None, True, VARIANT, True, True,
    )  # fmt: skip
    if VARIANT.fused_scale:
        values = values * numbers.scale
    return values


@triton.jit(do_not_specialize=LENGTHS)
def write_probabilities(
    query, query_strides, key, key_strides, value, value_strides, bias, bias_strides, mask, mask_strides,
    sinks, sinks_strides, seed, target,
    heads, group, query_count, key_count, left, right, diagonal, numbers,
    VARIANT: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """P of QUERY_BLOCK rows of one head, into `target` [B, H, Sq, Sk], contiguous, zeros (or NaN by rule) included."""
    blocks = tl.cdiv(query_count, QUERY_BLOCK)
    batch_head = tl.program_id(0) // blocks
    query_start = (tl.program_id(0) % blocks) * QUERY_BLOCK
    batch = batch_head // heads
    head = batch_head % heads
    key_head = head // group
    query_index = query_start + tl.arange(0, QUERY_BLOCK)
    inside = query_index < query_count
    if VARIANT.placed:
        numbers = Placed(*numbers, Place(batch, batch, head, 0, 0, query_count, key_count))
    if VARIANT.bias:
        bias = sequences.plane_of(bias, bias_strides, batch, head)
    if VARIANT.mask:
        mask = sequences.plane_of(mask, mask_strides, batch, head)
    query_tile = load_tile(
        query, query_strides, batch, head, query_start, query_count,
        QUERY_BLOCK, VARIANT.head_dim, VARIANT.width, VARIANT.descriptors, True,
    )  # fmt: skip
    row_max = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERY_BLOCK], tl.float32)
    start, whole_start, whole_end, end = key_range(
        query_start, key_count, left, right, diagonal, QUERY_BLOCK, KEY_BLOCK, VARIANT
    )
    for key_start in tl.range(start, end, KEY_BLOCK):
        values = natural_scores(
            query_tile, query_start, key_start, query_index, key, key_strides, bias, bias_strides, mask, mask_strides,
            batch, key_head, query_count, key_count, left, right, diagonal, numbers, VARIANT, KEY_BLOCK,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(values, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum *= tl.exp2((row_max - shift) * LOG2_E)
        row_sum += tl.sum(tl.exp2((values - shift[:, None]) * LOG2_E), 1)
        row_max = new_max
    if VARIANT.sinks:
        row = sinks + batch.to(tl.int64) * sinks_strides.batch + head.to(tl.int64) * sinks_strides.head
        sink = tl.load(row + query_index.to(tl.int64) * sinks_strides.row, mask=inside, other=0.0).to(tl.float32)
        new_max = tl.maximum(row_max, sink)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2((row_max - shift) * LOG2_E) + tl.exp2((sink - shift) * LOG2_E)
        row_max = new_max
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    factor = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if VARIANT.dead_rows_nan:
        factor = tl.where(row_sum == 0.0, float("nan"), factor)
    dropout_seed = 0
    if VARIANT.dropout and DROPPED:
        dropout_seed = tl.load(seed)
        factor = factor * dropout.keep_scale(numbers.dropout)
    rows = target + (batch_head.to(tl.int64) * query_count + query_index) * key_count
    for key_start in tl.range(0, key_count, KEY_BLOCK):
        values = natural_scores(
            query_tile, query_start, key_start, query_index, key, key_strides, bias, bias_strides, mask, mask_strides,
            batch, key_head, query_count, key_count, left, right, diagonal, numbers, VARIANT, KEY_BLOCK,
        )  # fmt: skip
        probabilities = tl.exp2((values - shift[:, None]) * LOG2_E) * factor[:, None]
        key_index = key_start + tl.arange(0, KEY_BLOCK)
        if VARIANT.dropout and DROPPED:
            kept = dropout.keep(
                dropout_seed, batch_head, query_index, key_start, query_count, key_count, numbers, VARIANT,
                QUERY_BLOCK, KEY_BLOCK, False,
            )  # fmt: skip
            probabilities = probabilities * tl.where(kept, 1.0, 0.0)  # not where(kept, P, 0): a NaN stays one
        places = rows[:, None] + key_index[None, :]
        tl.store(
            places, probabilities.to(target.dtype.element_ty), mask=inside[:, None] & (key_index < key_count)[None, :]
        )
