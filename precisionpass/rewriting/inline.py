"""A softmax or a norm as plain arithmetic in FP32 or FP64, which the inner backend fuses with its neighbours.

The formulas are those of precisionpass.reference; gradients are the inner backend's own.
"""

import torch
from torch import fx

from precisionpass import graph
from precisionpass.rewriting.writer import Writer
from precisionpass.sites.site import Rowwise

SOFTMAXES = ("softmax", "log_softmax")


def write_inline(
    kind: str, operation: Rowwise, writer: Writer, statistics: torch.dtype, prescale: bool = False
) -> fx.Node:
    """The calls that compute the site in `statistics` (FP64 where the site has FP64), rounded once."""
    have, want = graph.dtype(operation.x), graph.dtype(operation.output)
    wide = torch.float64 if torch.float64 in (have, want) else statistics
    x = writer.cast(writer.captured(operation.x), have, wide)
    if kind in SOFTMAXES:
        y = writer.call(getattr(torch, kind), x, operation.dims[0])
    else:
        y = _affine(operation, writer, _normalised(kind, operation, writer, x, prescale), wide)
    return writer.cast(y, wide, want)


def _normalised(kind: str, operation: Rowwise, writer: Writer, x: fx.Node, prescale: bool) -> fx.Node:
    """x or what is left of it without its mean, divided by the root of its mean square plus eps."""
    dims = list(operation.dims)
    eps = operation.eps if isinstance(operation.eps, int | float) else writer.captured(operation.eps)  # type: ignore[arg-type]
    if kind == "layer_norm":
        x = writer.call(torch.sub, x, writer.method("mean", x, dims, True))
    if prescale:  # the size is a constant for the gradient: the result does not depend on it
        size = writer.method("amax", writer.method("abs", writer.method("detach", x)), dims, True)
        size = writer.method("clamp_min", size, eps**0.5 if isinstance(eps, int | float) else 0.0)
        usable = writer.call(torch.logical_and, writer.call(torch.isfinite, size), writer.call(torch.gt, size, 0))
        size = writer.call(torch.where, usable, size, 1.0)
        x = writer.call(torch.div, x, size)
        eps = writer.call(torch.div, writer.call(torch.div, eps, size), size)
    spread = writer.method("mean", writer.call(torch.square, x), dims, True)
    return writer.call(torch.mul, x, writer.call(torch.rsqrt, writer.call(torch.add, spread, eps)))


def _affine(operation: Rowwise, writer: Writer, y: fx.Node, wide: torch.dtype) -> fx.Node:
    """y times the weight (or 1 + weight), plus the bias."""
    if operation.weight is not None:
        weight = writer.cast(writer.captured(operation.weight), graph.dtype(operation.weight), wide)
        if operation.weight_offset:
            weight = writer.call(torch.add, weight, operation.weight_offset)
        y = writer.call(torch.mul, y, weight)
    if operation.bias is not None:
        bias = writer.cast(writer.captured(operation.bias), graph.dtype(operation.bias), wide)
        y = writer.call(torch.add, y, bias)
    return y
