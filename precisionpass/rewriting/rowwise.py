"""A softmax or a norm op in place of a site's calls; a norm of a residual sum takes the sum in, where it may."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.ops.clipping import clip_gradient
from precisionpass.rewriting.hooking import on_gradient
from precisionpass.rewriting.inline import SOFTMAXES, write_inline
from precisionpass.rewriting.own import Actions, call_action
from precisionpass.rewriting.writer import CannotPlace, Placed, Writer, order_in_memory
from precisionpass.shadow import Shadow
from precisionpass.sites.legality import mutations
from precisionpass.sites.site import Rowwise


def write_rowwise(decision: Decision, shadow: Shadow, actions: Actions, wants_gradients: bool) -> Placed:
    """Replace the site by one call. Raises CannotPlace with the graph as it was."""
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Rowwise)
    clips = bool(decision.values["grad_clip"]) and wants_gradients and bool(operation.x.meta.get("grad"))
    if _by_kernel(decision) and not clips and (placed := _write_with_sum(decision, operation, shadow)) is not None:
        return placed
    writer = Writer(shadow, operation.output)
    try:
        if clips and not decision.own_action:
            writer.known[operation.x] = writer.call(_clip(decision), writer.captured(operation.x))
        return writer.replace(site.interior, {operation.output: _result(decision, operation, writer, actions)})
    except Exception:
        writer.undo()
        raise


def _clip(decision: Decision) -> Callable:
    """A function that gives its tensor as it is, and clips its gradient."""
    clip = decision.values["grad_clip"]

    def clipped(gradient: torch.Tensor) -> torch.Tensor:
        return clip_gradient(gradient, clip["kind"], float(clip["max"]), clip["on_nonfinite"])

    clipped.__name__ = "clip_gradient"
    return on_gradient(clipped)


def _by_kernel(decision: Decision) -> bool:
    """Whether the op is to be a kernel's: what it takes in is one pass over memory less."""
    values = decision.values
    asked = values["lowering"] == "kernel" or values["implementation"] == "triton"
    return asked and not decision.own_action and not values.get("prescale")


def _write_with_sum(decision: Decision, operation: Rowwise, shadow: Shadow) -> Placed | None:
    """The sum in front of a norm and the norm as one op, at the place of the sum; None where that cannot be."""
    terms = _terms(decision, operation, shadow)
    if terms is None:
        return None
    writer = Writer(shadow, operation.x)
    try:
        x, residual = (writer.captured(term) for term in terms)
        (_, *args), extra = _arguments(decision.site.kind, operation, writer, x)
        op = torch.ops.precisionpass.add_norm.default
        found = writer.call(op, x, residual, *args, decision.site.kind == "layer_norm", **extra)
        total, y = (writer.call(operator.getitem, found, place) for place in (0, 1))
        results = {operation.x: total, operation.output: y}
        return writer.replace(decision.site.interior | {operation.x}, results)
    except CannotPlace:
        writer.undo()
        return None
    except Exception:
        writer.undo()
        raise


def _terms(decision: Decision, operation: Rowwise, shadow: Shadow) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors whose plain sum a norm is of: of one shape and format, and laid out as the op lays them out."""
    total = operation.x
    source = shadow.source.get(total)
    if decision.site.kind in SOFTMAXES or graph.packet(total) is not aten.add or source is None:
        return None
    if source.target not in (operator.add, torch.add, "add") or graph.arguments(total)["alpha"] != 1:
        return None
    terms = total.args[:2]
    rank = len(graph.shape(total))
    in_order = all(order_in_memory(node) == [*range(rank)] for node in (total, operation.output))
    alike = all(graph.is_tensor(term) and _alike(term, total) for term in terms)
    grad_modes = {node.meta.get("grad") for node in (total, *decision.site.interior)}
    if operation.dims[-1] != rank - 1 or not in_order or not alike or len(grad_modes) > 1:
        return None
    if any(_written_to(node, shadow) for node in (total, operation.weight, operation.bias) if node is not None):
        return None
    return terms  # type: ignore[return-value]


def _alike(term: fx.Node, total: fx.Node) -> bool:
    sizes = zip(graph.shape(term), graph.shape(total), strict=False)
    same = len(graph.shape(term)) == len(graph.shape(total)) and all(graph.same_size(a, b) for a, b in sizes)
    return same and graph.dtype(term) == graph.dtype(total)


def _written_to(node: fx.Node, shadow: Shadow) -> bool:
    """Whether anything changes it in place: the op reads it earlier than the norm did, and again in its backward."""
    written = (w for call in mutations(shadow.graph.nodes) for w in graph.mutated(call) if graph.is_tensor(w))
    return any(graph.storage(w) == graph.storage(node) for w in written)


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
    args, extra = _arguments(kind, operation, writer, writer.captured(operation.x))
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


def _arguments(kind: str, operation: Rowwise, writer: Writer, x: fx.Node) -> tuple[list, dict[str, Any]]:
    """What the op of this kind is called with on x."""
    extra: dict[str, Any] = {"dtype": graph.dtype(operation.output)}
    if kind in SOFTMAXES:
        return [x, operation.dims[0]], extra
    weight, bias = (None if n is None else writer.captured(n) for n in (operation.weight, operation.bias))
    eps = operation.eps if isinstance(operation.eps, int | float) else writer.captured(operation.eps)  # type: ignore[arg-type]
    extra |= {"weight_offset": operation.weight_offset} if operation.weight_offset else {}
    return [x, len(operation.dims), weight, bias, eps], extra
