"""A softmax or a norm op in place of a site's calls."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.rewriting.inline import SOFTMAXES, write_inline
from precisionpass.rewriting.writer import Placed, Writer, order_in_memory
from precisionpass.shadow import Shadow
from precisionpass.sites.site import Rowwise


def write_rowwise(decision: Decision, shadow: Shadow) -> Placed:
    """Replace the site by one call. Raises CannotPlace with the graph as it was."""
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Rowwise)
    writer = Writer(shadow, operation.output)
    try:
        result = _result(site.kind, operation, writer, decision.values)
        return writer.replace(site.interior, {operation.output: result})
    except Exception:
        writer.undo()
        raise


def _result(kind: str, operation: Rowwise, writer: Writer, values: Mapping[str, Any]) -> fx.Node:
    like, dim = operation.output, operation.dims[0]
    if values["lowering"] == "inline" or values["statistics"] == "float64":
        result = write_inline(kind, operation, writer, getattr(torch, values["statistics"]))
        return writer.laid_out_as(like, result, () if kind in SOFTMAXES else order_in_memory(operation.x))
    op = getattr(torch.ops.precisionpass, kind).default
    x, dtype = writer.captured(operation.x), graph.dtype(like)
    if kind in SOFTMAXES:
        return writer.laid_out_as(like, writer.call(op, x, dim, dtype=dtype))
    last = len(graph.shape(operation.x)) - 1
    moved = operation.dims[-1] != last
    if moved:
        x = writer.method("movedim", x, dim, -1)
    weight, bias = (None if n is None else writer.captured(n) for n in (operation.weight, operation.bias))
    eps = operation.eps if isinstance(operation.eps, int | float) else writer.captured(operation.eps)  # type: ignore[arg-type]
    extra = {"weight_offset": operation.weight_offset} if operation.weight_offset else {}
    if values.get("prescale"):
        extra["prescale"] = True
    call = writer.call(op, x, len(operation.dims), weight, bias, eps, **extra, dtype=dtype)
    output = writer.call(operator.getitem, call, 0)
    if not moved:
        return writer.laid_out_as(like, output)
    order = [*(d for d in range(last + 1) if d != dim), dim]
    return writer.laid_out_as(like, writer.method("movedim", output, -1, dim), order)
