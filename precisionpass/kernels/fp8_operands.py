"""Q, K and V in FP8 before the forward: the largest magnitude of each head, then codes, V's turned for its product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionpass.kernels.fp8 import grouped, scale_of
from precisionpass.kernels.launch import strides_of
from precisionpass.kernels.tiles import load_tile
from precisionpass.kernels.tuning import Tile
from precisionpass.kernels.variant import Magnitudes

if TYPE_CHECKING:
    from precisionpass.kernels.launch import Plan

FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
EXPONENTS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # the limit is 1.75 * 2^this; P is multiplied by 2^this
ROWS = 128  # of a tile; keys and rows are padded to whole tiles, with zeros
TILES = 4


@triton.jit(do_not_specialize=["heads", "row_count"])
def measure(
    source, strides, magnitudes, heads, row_count, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COUNT: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """The bits of the largest magnitude of each head into magnitudes [B, H], of each column [B, H, PADDED].

    COUNT tiles a program; NaN counts as infinity.
    """
    blocks = tl.cdiv(row_count, ROWS * COUNT)
    batch_head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * (ROWS * COUNT)
    largest = tl.zeros([ROWS, PADDED], tl.float32)
    for number in range(COUNT):
        tile = load_tile(
            source, strides, batch_head // heads, batch_head % heads, start + number * ROWS, row_count,
            ROWS, WIDTH, PADDED, False, True,
        )  # fmt: skip
        largest = tl.maximum(largest, magnitude(tile))
    if BY_COLUMN:
        place = magnitudes + batch_head * PADDED + tl.arange(0, PADDED)
        tl.atomic_max(place, tl.max(largest, 0).to(tl.int32, bitcast=True))
    else:
        tl.atomic_max(magnitudes + batch_head, tl.max(tl.max(largest, 1), 0).to(tl.int32, bitcast=True))


@triton.jit
def magnitude(tile):
    """|tile| in FP32, infinity for NaN."""
    size = tl.abs(tile.to(tl.float32))
    return tl.where(size == size, size, float("inf"))


@triton.jit(do_not_specialize=["heads", "row_count"])
def quantise(
    source, strides, magnitudes, codes, heads, row_count, padded_count, FORMAT: tl.constexpr, LIMIT: tl.constexpr,
    EXPONENT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of source[batch, head] over their scale as codes [batch, head, padded_count, PADDED], or turned.

    SCALE: "head" and "column" read magnitudes, "row" and "block" find them and write scales. Beyond LIMIT it saturates,
    what is inf or NaN becomes NaN, and columns and rows past the source's become zero.
    """
    blocks = padded_count // ROWS
    batch_head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    start = block * ROWS
    tile = load_tile(
        source, strides, batch_head // heads, batch_head % heads, start, row_count, ROWS, WIDTH, PADDED, False, True
    ).to(tl.float32)
    if SCALE == "row":
        scale, reciprocal = scale_of(tl.max(magnitude(tile), 1).to(tl.int32, bitcast=True), EXPONENT)
        place = magnitudes + batch_head.to(tl.int64) * padded_count + start + tl.arange(0, ROWS)
        tl.store(place, scale.to(tl.int32, bitcast=True))
        reciprocal = reciprocal[:, None]
    elif SCALE == "block":
        scale, reciprocal = scale_of(tl.max(tl.max(magnitude(tile), 1), 0).to(tl.int32, bitcast=True), EXPONENT)
        tl.store(magnitudes + batch_head * blocks + block, scale.to(tl.int32, bitcast=True))
    elif SCALE == "column":
        _, reciprocal = scale_of(tl.load(magnitudes + batch_head * PADDED + tl.arange(0, PADDED)), EXPONENT)
        reciprocal = reciprocal[None, :]
    else:
        _, reciprocal = scale_of(tl.load(magnitudes + batch_head), EXPONENT)
    kept = tl.minimum(tl.maximum(tile * reciprocal, -LIMIT), LIMIT)
    kept = tl.where(tl.abs(tile) < float("inf"), kept, float("nan")).to(FORMAT)
    corner = codes + batch_head.to(tl.int64) * padded_count * PADDED
    if TURNED:
        kept = grouped(tl.trans(kept))
        place = tl.arange(0, PADDED)[:, None] * padded_count + start + tl.arange(0, ROWS)[None, :]
    else:
        place = (start + tl.arange(0, ROWS))[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    tl.store(corner + place, kept)


def quantise_operands(plan: Plan, launch: Callable[..., None]) -> None:
    """Put codes in the place of a plan's q, k and v where its products are FP8, and what scales them in its numbers."""
    qk, pv, scale = plan.arguments.products
    query, key, value = plan.operands
    sizes = [None, None, None]
    if qk is not None:
        query, sizes[0] = _in_fp8(launch, query, qk, scale, plan.width, turned=False)
        key, sizes[1] = _in_fp8(launch, key, qk, scale, plan.width, turned=False)
        plan.variant |= {"head_dim": plan.width, "qk_exponent": EXPONENTS[qk]}
    if pv is not None:
        value, sizes[2] = _in_fp8(launch, value, pv, scale, plan.value_width, turned=True)
        plan.variant |= {"pv_exponent": EXPONENTS[pv], "probability_dtype": FORMATS[pv]}
    plan.variant["fp8_scale"] = "head" if scale == "tensor" else scale
    plan.operands = query, key, value
    plan.numbers = plan.numbers._replace(magnitudes=Magnitudes(*sizes))


def _in_fp8(
    launch: Callable[..., None], source: Tensor, dtype: torch.dtype, scale: str, padded: int, *, turned: bool
) -> tuple[Tensor, Tensor]:
    """(codes, magnitudes) of `source` [B, H, S, W]: FP8 [B, H, S padded, `padded`] or turned, and int32 as `Magnitudes`
    has them, those of a whole tensor for each head."""
    batch, heads, rows, width = source.shape
    count = -(-rows // ROWS) * ROWS
    by_column = turned and scale == "row"
    each = {"row": padded if turned else count, "block": count // ROWS}.get(scale, 1)
    magnitudes = torch.zeros((batch, heads, each), dtype=torch.int32, device=source.device)
    shape = (batch, heads, padded, count) if turned else (batch, heads, count, padded)
    codes = torch.empty(shape, dtype=dtype, device=source.device)
    tile, place = Tile(ROWS, padded, 8, 1), (source, strides_of(source), magnitudes)
    if by_column or scale in ("head", "tensor"):
        launch(
            measure, batch * heads * -(-rows // (ROWS * TILES)), tile, *place, heads, rows,
            WIDTH=width, PADDED=padded, ROWS=ROWS, COUNT=TILES, BY_COLUMN=by_column,
        )  # fmt: skip
    if scale == "tensor":
        magnitudes.copy_(magnitudes.amax())
    launch(
        quantise, batch * heads * (count // ROWS), tile, *place, codes, heads, rows, count,
        FORMAT=FORMATS[dtype], LIMIT=LIMITS[dtype], EXPONENT=EXPONENTS[dtype], WIDTH=width, PADDED=padded, ROWS=ROWS,
        TURNED=turned, SCALE="column" if by_column else "head" if scale == "tensor" else scale,
    )  # fmt: skip
    return codes, magnitudes
