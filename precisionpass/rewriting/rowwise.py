"""A softmax or a norm op in place of a site's calls."""

import operator

import torch
from torch import fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.rewriting.writer import Placed, Writer
from precisionpass.shadow import Shadow
from precisionpass.sites.site import Rowwise


def write_rowwise(decision: Decision, shadow: Shadow) -> Placed:
    """Replace the site by one call. Raises CannotPlace with the graph as it was."""
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Rowwise)
    writer = Writer(shadow, operation.output)
    try:
        result = _result(site.kind, operation, writer)
        return writer.replace(site.interior, {operation.output: result})
    except Exception:
        writer.undo()
        raise


def _result(kind: str, operation: Rowwise, writer: Writer) -> fx.Node:
    op = getattr(torch.ops.precisionpass, kind).default
    x, dtype = writer.captured(operation.x), graph.dtype(operation.output)
    if kind in ("softmax", "log_softmax"):
        return writer.call(op, x, operation.dims[0], dtype=dtype)
    last = len(graph.shape(operation.x)) - 1
    moved = operation.dims[-1] != last
    if moved:
        x = writer.method("movedim", x, operation.dims[0], -1)
    weight, bias = (None if n is None else writer.captured(n) for n in (operation.weight, operation.bias))
    eps = operation.eps if isinstance(operation.eps, int | float) else writer.captured(operation.eps)  # type: ignore[arg-type]
    extra = {"weight_offset": operation.weight_offset} if operation.weight_offset else {}
    call = writer.call(op, x, len(operation.dims), weight, bias, eps, **extra, dtype=dtype)
    output = writer.call(operator.getitem, call, 0)
    return writer.method("movedim", output, -1, operation.dims[0]) if moved else output
