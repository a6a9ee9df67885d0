"""Norms and softmaxes over rows on a GPU: what the kernels can do, and the launches of forward and backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from precisionpass.kernels import norms, tuning
from precisionpass.kernels import norms_backward as backward
from precisionpass.kernels import softmax as softmaxes
from precisionpass.kernels.launch import launch
from precisionpass.kernels.tuning import Tile

WIDEST = 16384  # columns that stay in registers, at 16 warps 32 a thread
WIDEST_SOFTMAX = 65536  # bytes of a row that a softmax reads once
HELD_BYTES = 16384  # of a row that stays in registers beside its gradient and two sums over rows
ELEMENTS = 4096  # of a program's tile where rows are short
LINE = 32  # elements side by side that a tile takes at least where rows are not contiguous
WARP_COLUMNS = 1024  # of a program of one warp that sums over rows
ROWS_EACH = 128  # rows that it sums
FLOATING = (torch.bfloat16, torch.float16, torch.float32)


class Rows(NamedTuple):
    """A tensor as rows: [rows, columns], columns next to one another; `shape` is what it was."""

    tensor: Tensor
    rows: int
    columns: int


def supports(*tensors: Tensor | None) -> str | None:
    """None where the kernels can normalise these; else the reason."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in FLOATING:
            name = str(tensor.dtype).removeprefix("torch.")
            return f"the kernels compute in bfloat16, float16 and float32, not {name}"
    return None


def as_rows(x: Tensor, dims: int) -> Rows:
    """The last `dims` dimensions as columns; copied only where no stride describes that."""
    columns = math.prod(x.shape[x.dim() - dims :])
    rows = x.numel() // columns if columns else 0
    flat = x.reshape(rows, columns)
    return Rows(flat if flat.stride(1) == 1 or columns == 1 else flat.contiguous(), rows, columns)


def _tile(rows: int, columns: int) -> Tile:
    """A tile of so many rows and columns, with 32 elements a thread or fewer."""
    return Tile(rows, columns, min(max(rows * columns // 1024, 1), 16), 1)


def _tile_for(columns: int, widest: int = WIDEST) -> Tile:
    """The tile for contiguous rows of so many columns: whole rows, up to `widest`."""
    width = min(triton.next_power_of_2(max(columns, 16)), widest)
    return _tile(max(ELEMENTS // width, 1), width)


def norm_forward(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    dtype: torch.dtype | None, *, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, mean, rstd) as reference/layer_norm.py and rms_norm.py state them; mean [0] without `center`."""
    return _norm_forward(x, None, None, dims, weight, bias, eps, offset, dtype, center)


def add_norm_forward(
    x: Tensor, residual: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    dtype: torch.dtype | None, *, center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(total, y, mean, rstd) of total = x + residual, of their shape and format; one launch up to WIDEST columns."""
    if math.prod(x.shape[x.dim() - dims :]) > WIDEST:
        total = torch.add(x, residual).contiguous()
        return total, *norm_forward(total, dims, weight, bias, eps, offset, dtype, center=center)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, *_norm_forward(x, residual, total, dims, weight, bias, eps, offset, dtype, center)


def _norm_forward(
    x: Tensor, residual: Tensor | None, total: Tensor | None, dims: int, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, dtype: torch.dtype | None, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """norm_forward of x, or of x + residual, which is left in `total`."""
    flat, rows, columns = as_rows(x, dims)
    addend = None if residual is None else as_rows(residual, dims).tensor
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    shape = (*x.shape[: x.dim() - dims], *(1,) * dims)
    rstd = torch.empty(shape, dtype=torch.float32, device=x.device)
    mean = torch.empty(shape if center else (0,), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, mean.fill_(math.nan), rstd.fill_(math.nan)
    parameters = (_flat(weight), _flat(bias), mean, rstd, rows, columns, float(eps), float(offset))
    kind = {"CENTER": center, "WEIGHT": weight is not None, "BIAS": bias is not None}
    tile = _tile_for(columns)
    if columns > tile.key_block:
        stages = 3 if tuning.moves_tiles(tuning.architecture()) else 1
        short = all(part is None or part.dtype.itemsize == 2 for part in (x, weight, bias))
        fits = columns <= 2 * WIDEST and short
        tile = Tile(1, 2 * WIDEST, 16, 1) if fits else Tile(1, ELEMENTS if center else 2 * ELEMENTS, 8, stages)
    with torch.cuda.device_of(x):
        if columns > tile.key_block:
            launch(
                norms.norm_forward_wide, rows, tile, flat, flat.stride(0), y, *parameters, **kind,
                WIDTH=tile.key_block, STAGES=tile.stages,
            )  # fmt: skip
        else:
            launch(
                norms.norm_forward, triton.cdiv(rows, tile.query_block), tile, flat, flat.stride(0),
                addend, 0 if addend is None else addend.stride(0), total, y, *parameters, **kind,
                RESIDUAL=addend is not None, ROWS=tile.query_block, WIDTH=tile.key_block,
            )  # fmt: skip
    return y, mean, rstd


def norm_backward(
    gradient: Tensor, x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    rstd: Tensor, offset: float, needs: tuple[bool, bool, bool], further: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias) as the references state them; [0] where not needed. The same inputs give the same bits."""
    needs_x, needs_weight, needs_bias = needs
    flat, rows, columns = as_rows(x, dims)
    slope = as_rows(gradient, dims).tensor
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else x.new_empty(0)
    if x.numel() == 0:
        dweight, dbias = (
            torch.zeros_like(parameter) if parameter is not None and needed else x.new_empty(0)
            for parameter, needed in ((weight, needs_weight), (bias, needs_bias))
        )
        return dx, dweight, dbias
    center = mean is not None
    further = None if further is None else further.contiguous()
    kind = {"CENTER": center, "WEIGHT": weight is not None, "FURTHER": further is not None}
    inputs = (slope, slope.stride(0), flat, flat.stride(0))
    with torch.cuda.device_of(x):
        tile, programs, held = _backward_tile(rows, columns, (gradient, x, weight), needs_weight + needs_bias)
    halves = held and tile.key_block < columns
    parts = programs // (1 + halves) if held else triton.cdiv(rows, ROWS_EACH)
    dweight, dbias = (
        torch.empty((parts, columns) if needed else (0,), dtype=torch.float32, device=x.device)
        for needed in (needs_weight, needs_bias)
    )
    sums = {"DWEIGHT": needs_weight, "DBIAS": needs_bias}
    settings = (*inputs, _flat(weight), mean, rstd, further, dx)
    kind |= {"WIDTH": tile.key_block, "STAGES": tile.stages}
    with torch.cuda.device_of(x):
        if held and halves:
            launch(
                backward.norm_backward_halves, programs, tile, *settings, dweight, dbias, rows, columns,
                float(offset), parts, **kind, **sums, DX=needs_x,
            )  # fmt: skip
        elif held or (needs_x and columns <= tile.key_block):
            launch(
                backward.norm_backward, programs, tile, *settings, dweight, dbias, rows, columns, float(offset),
                programs, **kind, DX=needs_x, ROWS=tile.query_block, **{name: held and sums[name] for name in sums},
            )  # fmt: skip
        elif needs_x:
            launch(
                backward.norm_backward_wide, programs, tile, *settings, rows, columns, float(offset), **kind
            )
        if not held and (needs_weight or needs_bias):
            launch(
                backward.norm_parameters, parts * triton.cdiv(columns, WARP_COLUMNS), Tile(1, WARP_COLUMNS, 1, 1),
                *inputs, mean, rstd, dweight, dbias, rows, columns, ROWS_EACH, CENTER=center, **sums,
                WIDTH=WARP_COLUMNS,
            )  # fmt: skip
    return dx, _total(dweight, weight if needs_weight else x), _total(dbias, bias if needs_bias else x)


def _backward_tile(
    rows: int, columns: int, read: tuple[Tensor, Tensor, Tensor | None], sums: int
) -> tuple[Tile, int, bool]:
    """(tile, programs, whether they hold their sums) of a backward. A tile of half a row is shared by two programs.

    read: gradient, x, weight. Programs with sums fill the GPU once, at 128 registers a thread, or at all of them where
    rows are wide.
    """
    x, name = read[1], tuning.architecture()
    width = triton.next_power_of_2(max(columns, 16))
    size = width * x.dtype.itemsize
    stages = 1 if name == "small" else 3
    multiprocessors = max(tuning.multiprocessors(x.device), 2)
    if size <= HELD_BYTES:
        warps, many = max(width // 512, 1), max(256 // width, 1)
        tile = Tile(many, width, warps, stages, registers=128 if stages > 1 else 0)
        return tile, min(triton.cdiv(rows, many), multiprocessors * max(16 // warps, 1)), True
    alike = all(part is None or part.dtype.itemsize <= x.dtype.itemsize for part in read)
    if size > 2 * HELD_BYTES:
        return (Tile(1, WIDEST, 32, 1) if alike and x.dtype.itemsize == 2 else Tile(1, WIDEST // 2, 16, 1)), rows, False
    if not alike or not tuning.moves_tiles(name):
        stages = 1  # what is on its way would not fit into the shared memory
    if sums == 0 or not alike:
        return Tile(1, width, 32, stages), min(rows, multiprocessors), False
    if sums == 1:
        return Tile(1, width, 8, 1), min(rows, multiprocessors), True
    return Tile(1, width // 2, 8, stages), 2 * min(rows, multiprocessors // 2), True


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1)


def _total(parts: Tensor, like: Tensor) -> Tensor:
    """The programs' sums, added up in a fixed order, in a parameter's shape and format; [0] stays [0], in x's."""
    return parts.sum(0).view(like.shape).to(like.dtype) if parts.dim() > 1 else parts.to(like.dtype)


def softmax_forward(x: Tensor, dim: int, dtype: torch.dtype | None, *, log: bool) -> Tensor:
    """softmax or log_softmax along `dim` as reference/softmax.py states it."""
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if x.numel():
        _along(softmaxes.softmax_forward, x, dim, (x.contiguous(), y), LOG=log)
    return y


def softmax_backward(gradient: Tensor, x: Tensor, dim: int, *, log: bool) -> Tensor:
    """The gradient by x in x's format; y is made again from x."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _along(softmaxes.softmax_backward, x, dim, (gradient.contiguous(), x.contiguous(), dx), LOG=log)
    return dx


def _along(kernel, x: Tensor, dim: int, tensors: tuple[Tensor, ...], **constants: bool) -> None:
    """Launch over every row along `dim`."""
    dim = dim % max(x.dim(), 1)
    columns = x.shape[dim] if x.dim() else 1
    rows, inner = x.numel() // columns, math.prod(x.shape[dim + 1 :])
    each = 16 if len(tensors) == 2 or columns <= 2048 else 32
    tile = _softmax_tile(columns, x.dtype.itemsize, each)
    if inner > 1:  # rows stand side by side: a tile takes at least a line of memory of them
        tile = _tile_for(columns)
        tile = _tile(max(tile.query_block, LINE), min(tile.key_block, ELEMENTS // LINE))
    with torch.cuda.device_of(x):
        launch(
            kernel, triton.cdiv(rows, tile.query_block), tile, *tensors, rows, columns, inner,
            ROWS=tile.query_block, WIDTH=tile.key_block, ONCE=columns <= tile.key_block, **constants,
        )  # fmt: skip


def _softmax_tile(columns: int, itemsize: int, each: int) -> Tile:
    """The tile for contiguous rows: whole rows up to WIDEST_SOFTMAX bytes, `each` elements a thread while they last."""
    width = triton.next_power_of_2(max(columns, 16))
    if width * itemsize > WIDEST_SOFTMAX:
        return Tile(1, WIDEST, 32, 1) if each == 16 else Tile(1, WIDEST // 2, 16, 1)
    many = max(1024 // width, 1)
    if width * itemsize > WIDEST_SOFTMAX // 2 or (width == 16384 and each == 32):
        return Tile(many, width, 32, 1)
    return Tile(many, width, min(max(many * width // (32 * each), 1), 16), 1)
