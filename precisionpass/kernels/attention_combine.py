"""Few rows over many keys: the keys are split over programs, and this puts the parts together, in their order.

    lse = log sum_s exp(lse_s)      O = sum_s exp(lse_s - lse) O_s      each O_s FP32, normalised by its own part
"""

import triton
import triton.language as tl

from precisionpass.kernels import residual as residual_code
from precisionpass.kernels.online_softmax import bounded
from precisionpass.kernels.scores import LOG2_E

FEWEST_BLOCKS = 4  # key blocks that a program must have to be worth its start


def splits_for(programs: int, key_blocks: int, multiprocessors: int) -> int:
    """Into how many parts to split the keys of `programs` programs so that they fill the device; 1 is no split."""
    if programs == 0 or 2 * programs > multiprocessors:
        return 1
    return max(1, min(2 * multiprocessors // programs, key_blocks // FEWEST_BLOCKS))


@triton.jit(do_not_specialize=["heads", "query_count", "splits"])
def combine_splits(
    parts, parts_log_sum, parts_maximum, output, output_strides, residual, residual_strides, log_sum_exp, maximum,
    heads, query_count, splits, output_limit,
    VARIANT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row: parts [B, H * splits, Sq, Dv] FP32, contiguous, to the output's format, its residual and its lse."""
    VALUE_WIDTH: tl.constexpr = VARIANT.value_width
    row = tl.program_id(0) % query_count
    batch_head = tl.program_id(0) // query_count
    batch = batch_head // heads
    head = batch_head % heads
    part = tl.arange(0, PARTS)
    exists = part < splits
    columns = tl.arange(0, VALUE_WIDTH)
    inside = columns < VARIANT.value_dim
    place = (batch_head.to(tl.int64) * splits + part) * query_count + row

    log_sums = tl.load(parts_log_sum + place, mask=exists, other=float("-inf"))
    largest = tl.max(log_sums, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2((log_sums - shift) * LOG2_E)
    total = tl.sum(weights, 0)
    pointers = parts + place[:, None] * VARIANT.value_dim + columns[None, :]
    values = tl.load(pointers, mask=exists[:, None] & inside[None, :], other=0.0)
    precise = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if VARIANT.dead_rows_nan:
        precise = tl.where(total == 0.0, float("nan"), precise)
    if VARIANT.output_clip:
        precise = bounded(precise, output_limit)

    statistics = batch_head.to(tl.int64) * query_count + row
    tl.store(log_sum_exp + statistics, tl.where(total == 0.0, float("-inf"), shift + tl.log(total)))
    if VARIANT.row_max:
        tl.store(maximum + statistics, tl.max(tl.load(parts_maximum + place, mask=exists, other=float("-inf")), 0))
    rounded = precise.to(output.dtype.element_ty)
    corner = batch.to(tl.int64) * output_strides.batch + head.to(tl.int64) * output_strides.head
    target = corner + row.to(tl.int64) * output_strides.row + columns
    tl.store(output + target, rounded, mask=inside)
    if VARIANT.residual:
        tl.store(residual + target, residual_code.encode(precise, rounded, statistics, columns), mask=inside)
