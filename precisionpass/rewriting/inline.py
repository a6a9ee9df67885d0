"""A softmax or a norm as plain arithmetic in FP32 or FP64, which the inner backend fuses with its neighbours.

The formulas are those of precisionpass.reference; gradients are the inner backend's own.
"""

import torch
from torch import fx

from precisionpass import graph
from precisionpass.rewriting.writer import Writer
from precisionpass.sites.site import Rowwise

SOFTMAXES = ("softmax", "log_softmax")


def write_inline(kind: str, operation: Rowwise, writer: Writer, statistics: torch.dtype) -> fx.Node:
    """The calls that compute the site in `statistics` (FP64 where the site has FP64), rounded once."""
    have, want = graph.dtype(operation.x), graph.dtype(operation.output)
    wide = torch.float64 if torch.float64 in (have, want) else statistics
    x = writer.cast(writer.captured(operation.x), have, wide)
    if kind in SOFTMAXES:
        y = writer.call(getattr(torch, kind), x, operation.dims[0])
    else:
        y = _norm(kind, operation, writer, x, wide)
    return writer.cast(y, wide, want)


def _norm(kind: str, operation: Rowwise, writer: Writer, x: fx.Node, wide: torch.dtype) -> fx.Node:
    dims = list(operation.dims)
    if kind == "layer_norm":
        x = writer.call(torch.sub, x, writer.method("mean", x, dims, True))
    spread = writer.method("mean", writer.call(torch.square, x), dims, True)
    eps = operation.eps if isinstance(operation.eps, int | float) else writer.captured(operation.eps)  # type: ignore[arg-type]
    y = writer.call(torch.mul, x, writer.call(torch.rsqrt, writer.call(torch.add, spread, eps)))
    if operation.weight is not None:
        weight = writer.cast(writer.captured(operation.weight), graph.dtype(operation.weight), wide)
        if operation.weight_offset:
            weight = writer.call(torch.add, weight, operation.weight_offset)
        y = writer.call(torch.mul, y, weight)
    if operation.bias is not None:
        bias = writer.cast(writer.captured(operation.bias), graph.dtype(operation.bias), wide)
        y = writer.call(torch.add, y, bias)
    return y
