"""A softmax or a norm op in place of a site's calls."""

import operator
from typing import Any

import torch
from torch import fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.rewriting.inline import SOFTMAXES, write_inline
from precisionpass.rewriting.own import Actions, call_action
from precisionpass.rewriting.writer import Placed, Writer, order_in_memory
from precisionpass.shadow import Shadow
from precisionpass.sites.site import Rowwise


def write_rowwise(decision: Decision, shadow: Shadow, actions: Actions) -> Placed:
    """Replace the site by one call. Raises CannotPlace with the graph as it was."""
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Rowwise)
    writer = Writer(shadow, operation.output)
    try:
        return writer.replace(site.interior, {operation.output: _result(decision, operation, writer, actions)})
    except Exception:
        writer.undo()
        raise


def _result(decision: Decision, operation: Rowwise, writer: Writer, actions: Actions) -> fx.Node:
    kind, values, like = decision.site.kind, decision.values, operation.output
    by_action = decision.own_action
    # On a GPU the op is the kernels, and the reference is the same formula inline.
    by_reference = values["implementation"] == "reference" and graph.value(like).device.type != "cpu"
    # An op in the middle of what the backend would fuse slows a model down: auto keeps it fusible.
    unasked = values["lowering"] == "auto" and values["implementation"] == "auto"
    inline = by_reference or unasked or values["lowering"] == "inline" or values["statistics"] == "float64"
    if inline and not by_action:
        result = write_inline(
            kind, operation, writer, getattr(torch, values["statistics"]), bool(values.get("prescale"))
        )
        return writer.laid_out_as(like, result, () if kind in SOFTMAXES else order_in_memory(operation.x))
    args, extra = _arguments(kind, operation, writer)
    if values.get("prescale") and not by_action:
        extra["prescale"] = True
    moved = kind not in SOFTMAXES and operation.dims[-1] != len(graph.shape(operation.x)) - 1
    if moved:
        args[0] = writer.method("movedim", args[0], operation.dims[0], -1)
    if by_action:
        result = call_action(writer, decision, actions, args, extra, lambda: graph.value(args[0]).to(extra["dtype"]))
        order = order_in_memory(result)
    else:
        op = getattr(torch.ops.precisionpass, kind).default
        result, order = writer.call(op, *args, **extra), range(len(graph.shape(like)))
        result = result if kind in SOFTMAXES else writer.call(operator.getitem, result, 0)
    if moved:
        back = [*range(len(order))]
        back.insert(operation.dims[0], back.pop())  # the dimension of `result` that stands at each place by now
        result, order = writer.method("movedim", result, -1, operation.dims[0]), [back.index(dim) for dim in order]
    return writer.laid_out_as(like, result, order)


def _arguments(kind: str, operation: Rowwise, writer: Writer) -> tuple[list, dict[str, Any]]:
    """What the op of this kind is called with."""
    x, extra = writer.captured(operation.x), {"dtype": graph.dtype(operation.output)}
    if kind in SOFTMAXES:
        return [x, operation.dims[0]], extra
    weight, bias = (None if n is None else writer.captured(n) for n in (operation.weight, operation.bias))
    eps = operation.eps if isinstance(operation.eps, int | float) else writer.captured(operation.eps)  # type: ignore[arg-type]
    extra |= {"weight_offset": operation.weight_offset} if operation.weight_offset else {}
    return [x, len(operation.dims), weight, bias, eps], extra
