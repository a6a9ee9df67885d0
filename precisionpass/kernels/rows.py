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
WIDEST_BACKWARD = 16384  # with their gradient and one sum over rows, at 8 warps 64 a thread
ELEMENTS = 4096  # of a program's tile where rows are short
LINE = 32  # elements side by side that a tile takes at least where rows are not contiguous
WARP_COLUMNS = 1024  # of a program of one warp that sums over rows
ROWS_EACH = 128  # rows that it sums
MOST_PROGRAMS = 16  # of one warp on a multiprocessor
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
    sums = tuple(name for name, needed in (("DWEIGHT", needs_weight), ("DBIAS", needs_bias)) if needed)
    tile, programs = _persistent(rows, columns, x.dtype, x.device)
    held = sums[: _sums_held(columns, x.dtype)]  # beside the rows
    parts = {name: programs if name in held else triton.cdiv(rows, ROWS_EACH) for name in sums}
    dweight, dbias = (
        torch.empty((parts[name], columns) if name in parts else (0,), dtype=torch.float32, device=x.device)
        for name in ("DWEIGHT", "DBIAS")
    )
    with torch.cuda.device_of(x):
        if columns <= WIDEST_BACKWARD and (needs_x or held):
            launch(
                norms.norm_backward, programs, tile, *inputs, _flat(weight), mean, rstd, further, dx, dweight, dbias,
                rows, columns, float(offset), programs, **kind, DX=needs_x, DWEIGHT="DWEIGHT" in held,
                DBIAS="DBIAS" in held, ROWS=tile.query_block, WIDTH=tile.key_block, STAGES=tile.stages,
            )  # fmt: skip
        elif needs_x:
            launch(
                norms.norm_backward_wide, rows, Tile(1, WIDEST, 32, 1), *inputs, _flat(weight), mean, rstd, further, dx,
                rows, columns, float(offset), **kind, WIDTH=WIDEST,
            )  # fmt: skip
        if len(held) < len(sums):
            launch(
                norms.norm_parameters, triton.cdiv(rows, ROWS_EACH) * triton.cdiv(columns, WARP_COLUMNS),
                Tile(1, WARP_COLUMNS, 1, 1), *inputs, mean, rstd, dweight, dbias, rows, columns, ROWS_EACH,
                CENTER=center, DWEIGHT="DWEIGHT" in sums and "DWEIGHT" not in held,
                DBIAS="DBIAS" in sums and "DBIAS" not in held, WIDTH=WARP_COLUMNS,
            )  # fmt: skip
    return dx, _total(dweight, weight if needs_weight else x), _total(dbias, bias if needs_bias else x)


def _persistent(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, int]:
    """The tile of a backward that keeps its sums, and the programs that fill the GPU once: 128 registers a thread."""
    width = min(triton.next_power_of_2(max(columns, 16)), WIDEST_BACKWARD)
    many = max(256 // width, 1)
    small = tuning.architecture() == "small"
    if width == WIDEST_BACKWARD:
        tile, each = Tile(many, width, 8, 1), 1
    else:
        warps = max(width // 512, 1)
        tile, each = Tile(many, width, warps, 1 if small else 3, registers=0 if small else 128), max(16 // warps, 1)
    filled = tuning.multiprocessors(device) * min(each, MOST_PROGRAMS)
    return tile, max(min(triton.cdiv(rows, many), filled), 1)


def _sums_held(columns: int, dtype: torch.dtype) -> int:
    """How many sums over rows fit into registers beside a row and its gradient."""
    width = columns * dtype.itemsize
    return 2 if width <= WIDEST_BACKWARD else 1 if width <= 2 * WIDEST_BACKWARD else 0


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
