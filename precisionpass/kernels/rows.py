"""Norms and softmaxes over rows on a GPU: what the kernels can do, and the launches of forward and backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from precisionpass.kernels import norms, tuning
from precisionpass.kernels import softmax as softmaxes
from precisionpass.kernels.launch import launch
from precisionpass.kernels.tuning import Tile

WIDEST = 16384  # columns that stay in registers, at 16 warps 32 a thread
WIDEST_BACKWARD = 8192  # the sums for the parameters stay beside two rows
ELEMENTS = 4096  # of a program's tile where rows are short
LINE = 32  # elements side by side that a tile takes at least where rows are not contiguous
PROGRAMS_EACH = 4  # programs on a multiprocessor that share the rows of a backward
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
    tile = _tile_for(columns)
    with torch.cuda.device_of(x):
        launch(
            norms.norm_forward, triton.cdiv(rows, tile.query_block), tile, flat, flat.stride(0),
            addend, 0 if addend is None else addend.stride(0), total, y,
            _flat(weight), _flat(bias), mean, rstd, rows, columns, float(eps), float(offset),
            CENTER=center, WEIGHT=weight is not None, BIAS=bias is not None, RESIDUAL=addend is not None,
            ROWS=tile.query_block, WIDTH=tile.key_block, ONCE=columns <= tile.key_block,
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
    tile = _tile_for(columns, WIDEST_BACKWARD)
    many, once = tile.query_block, columns <= tile.key_block
    center = mean is not None
    parts = max(min(rows, tuning.multiprocessors(x.device) * PROGRAMS_EACH), 1)
    each = triton.cdiv(triton.cdiv(rows, parts), many) * many if once else triton.cdiv(rows, parts)
    parts = triton.cdiv(rows, each)
    shape = (parts, columns)
    dweight = torch.empty(shape if needs_weight else (0,), dtype=torch.float32, device=x.device)
    dbias = torch.empty(shape if needs_bias else (0,), dtype=torch.float32, device=x.device)
    inputs = (slope, slope.stride(0), flat, flat.stride(0))
    further = None if further is None else further.contiguous()
    kind = {"CENTER": center, "WEIGHT": weight is not None, "FURTHER": further is not None}
    with torch.cuda.device_of(x):
        if once:
            launch(
                norms.norm_backward, parts, tile, *inputs, _flat(weight), mean, rstd, further,
                dx, dweight, dbias, rows, columns, float(offset), each, **kind, DX=needs_x,
                DWEIGHT=needs_weight, DBIAS=needs_bias, ROWS=many, WIDTH=tile.key_block,
            )  # fmt: skip
        elif needs_x:
            launch(
                norms.norm_backward_wide, rows, tile, *inputs, _flat(weight), mean, rstd, further, dx, rows,
                columns, float(offset), **kind, WIDTH=tile.key_block,
            )  # fmt: skip
        if not once and (needs_weight or needs_bias):
            launch(
                norms.norm_parameters, parts * triton.cdiv(columns, ELEMENTS), _tile(1, ELEMENTS), *inputs,
                mean, rstd, dweight, dbias, rows, columns, each,
                CENTER=center, DWEIGHT=needs_weight, DBIAS=needs_bias, WIDTH=ELEMENTS,
            )  # fmt: skip
    return dx, _total(dweight, weight if needs_weight else x), _total(dbias, bias if needs_bias else x)


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
    tile = _tile_for(columns)
    if inner > 1:  # rows stand side by side: a tile takes at least a line of memory of them
        tile = _tile(max(tile.query_block, LINE), min(tile.key_block, ELEMENTS // LINE))
    with torch.cuda.device_of(x):
        launch(
            kernel, triton.cdiv(rows, tile.query_block), tile, *tensors, rows, columns, inner,
            ROWS=tile.query_block, WIDTH=tile.key_block, ONCE=columns <= tile.key_block, **constants,
        )  # fmt: skip
