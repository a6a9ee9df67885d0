"""What recording asks of a GPU beside the attention kernels: their row sums folded, and magnitudes in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionpass.hooks.figures import ROWS, SUMS
from precisionpass.kernels.launch import padded, strides_of
from precisionpass.kernels.row_statistics import RowStatistics
from precisionpass.kernels.tiles import load_tile

if TYPE_CHECKING:
    from precisionpass.hooks.collector import Collector

ROWS_AT_A_TIME = 64
FOLDED = ("sequences", "rows", "bias_sequences", "bias", "bias_square", "bias_size")
PLACE = {name: tl.constexpr(ROWS.index(name)) for name in FOLDED}
SEQUENCES, ALL_ROWS, SAMPLES, BIAS, SQUARE, SIZE = PLACE.values()
SUM_COUNT, ROW_COUNT = tl.constexpr(len(SUMS)), tl.constexpr(len(ROWS))


@triton.jit(do_not_specialize=["heads", "length"])
def magnitude(
    tensor, strides, result, heads, length, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Into result, int32 [2]: the bits of the largest finite magnitude, and how many elements are not finite.

    The bits of FP32 numbers that are not negative are in their order, so the largest of them is found by integers:
    whichever program comes first, the result is the same.
    """
    blocks = tl.cdiv(length, ROWS)
    batch_head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * ROWS
    tile = load_tile(
        tensor, strides, batch_head // heads, batch_head % heads, start, length, ROWS, COLUMNS, WIDTH, False, True
    )
    size = tl.abs(tile.to(tl.float32))
    is_finite = size < float("inf")
    largest = tl.max(tl.max(tl.where(is_finite, size, 0.0), 1), 0)
    strange = tl.sum(tl.sum(tl.where(is_finite, 0, 1), 1), 0)
    tl.atomic_max(result, largest.to(tl.int32, bitcast=True))
    if strange > 0:
        tl.atomic_add(result + 1, strange)


@triton.jit(do_not_specialize=["count", "padded_count"])
def sequence_sums(sums, sizes, result, count, padded_count, BLOCK: tl.constexpr):
    """Into result, FP64 [batch * heads, 2]: the sum over the finite rows of one head of one sequence, and of sizes."""
    start = tl.program_id(0).to(tl.int64) * padded_count
    total = tl.zeros([BLOCK], tl.float64)
    size = tl.zeros([BLOCK], tl.float64)
    for row in range(0, count, BLOCK):
        index = row + tl.arange(0, BLOCK)
        found = tl.load(sums + start + index, mask=index < count, other=0.0)
        total += tl.where(tl.abs(found) < float("inf"), found, 0.0).to(tl.float64)
        found = tl.load(sizes + start + index, mask=index < count, other=0.0)
        size += tl.where(found < float("inf"), found, 0.0).to(tl.float64)
    tl.store(result + tl.program_id(0) * 2, tl.sum(total, 0))
    tl.store(result + tl.program_id(0) * 2 + 1, tl.sum(size, 0))


@triton.jit(do_not_specialize=["batch", "heads", "rows"])
def fold(result, call, batch, heads, rows, BATCH: tl.constexpr, PADDED_ROWS: tl.constexpr):
    """The totals of a call, one column a head, from the sums of its sequences (hooks/totals.py)."""
    head = tl.program_id(0)
    sequence = tl.arange(0, BATCH)
    place = (sequence * heads + head) * 2
    sums = tl.load(result + place, mask=sequence < batch, other=0.0)
    sizes = tl.load(result + place + 1, mask=sequence < batch, other=0.0)
    row = tl.arange(0, PADDED_ROWS)
    value = tl.where(row < SUM_COUNT, 0.0, float("-inf")).to(tl.float64)
    value = tl.where((row == SEQUENCES) | (row == SAMPLES), batch.to(tl.float64), value)
    value = tl.where(row == ALL_ROWS, rows.to(tl.float64), value)
    value = tl.where(row == BIAS, tl.sum(sums, 0), value)
    value = tl.where(row == SQUARE, tl.sum(sums * sums, 0), value)
    value = tl.where(row == SIZE, tl.sum(sizes, 0), value)
    tl.store(call + row * heads + head, value, mask=row < ROW_COUNT)


def record(collector: Collector, rows: RowStatistics) -> None:
    """Give the collector what the backward kernels left, and the way to measure tensors here."""
    collector.measure = magnitudes
    if rows.sums is None:
        return
    arguments, count = rows.arguments, rows.arguments.q.shape[2]
    sums = rows.sums
    if arguments.sinks is not None:  # a sink takes its part of dS
        share = (arguments.sinks.squeeze(-1).float() - rows.saved.lse).exp()
        sums[:, :, :count] -= rows.delta[:, :, :count] * share
    if rows.lse_gradient is not None:  # and the row sums to what is asked of the lse
        sums[:, :, :count] -= rows.lse_gradient
    if arguments.packed or rows.sizes is None:
        collector.row_sums_of(sums[:, :, :count])
    else:
        collector.call = folded(sums, rows.sizes, count)


def folded(sums: Tensor, sizes: Tensor, count: int) -> Tensor:
    """The totals, [len(ROWS), heads] FP64, of `count` rows of [batch, heads, padded rows] sums and sizes."""
    batch, heads, padded_count = sums.shape
    result = torch.empty(batch * heads, 2, dtype=torch.float64, device=sums.device)
    call = torch.empty(len(ROWS), heads, dtype=torch.float64, device=sums.device)
    sequence_sums[(batch * heads,)](sums, sizes, result, count, padded_count, BLOCK=1024)
    fold[(heads,)](
        result, call, batch, heads, batch * count, BATCH=triton.next_power_of_2(batch),
        PADDED_ROWS=triton.next_power_of_2(len(ROWS)),
    )  # fmt: skip
    return call


def magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(largest finite magnitude FP32, elements that are not finite int32) by name, scalars on the device.

    Of 4-D tensors with any strides; each is read once.
    """
    results = torch.zeros(len(tensors), 2, dtype=torch.int32, device=next(iter(tensors.values())).device)
    with torch.cuda.device_of(results):
        for result, tensor in zip(results, tensors.values(), strict=True):
            batch, heads, length, width = tensor.shape
            magnitude[(batch * heads * triton.cdiv(length, ROWS_AT_A_TIME),)](
                tensor, strides_of(tensor), result, heads, length,
                COLUMNS=width, WIDTH=padded(width), ROWS=ROWS_AT_A_TIME, num_warps=4,
            )  # fmt: skip
    largest = results[:, 0].view(torch.float32)
    return {name: (largest[place], results[place, 1]) for place, name in enumerate(tensors)}
