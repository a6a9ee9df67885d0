"""The attention op in place of a site's calls."""

import operator

import torch
from torch import fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.rewriting.arrange import strides_matter
from precisionpass.rewriting.hooking import Hooks, hooked
from precisionpass.rewriting.operands import operands
from precisionpass.rewriting.own import Actions, call_action
from precisionpass.rewriting.recording import Recording, prepare
from precisionpass.rewriting.settings import settings
from precisionpass.rewriting.writer import ActionRefuses, Placed, Writer
from precisionpass.shadow import Shadow
from precisionpass.sites.band import as_arguments
from precisionpass.sites.describe import attention_dtype
from precisionpass.sites.site import Attention

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def write_attention(
    decision: Decision, shadow: Shadow, wants_gradients: bool, actions: Actions, hooks: Hooks,
    recording: Recording | None,
) -> Placed:  # fmt: skip
    """Replace the site by one call of torch.ops.precisionpass.attention, or of the user's action in its place.

    Raises CannotPlace, the graph as it was.
    """
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Attention)
    writer = Writer(shadow, operation.output)
    kept = [shadow.source[node] for node, _ in operation.probabilities if node in shadow.source]
    readers = [user for node in kept for user in node.users if shadow.image.get(user) not in site.interior]
    writer.before = min([writer.before, *readers])  # what reads the probabilities may stand in front of the output
    try:
        gradients = wants_gradients and bool(operation.output.meta.get("grad"))
        results = _results(decision, operation, writer, gradients, actions, hooks, recording)
        return writer.replace(site.interior, results)
    except Exception:
        writer.undo()
        raise


def _results(
    decision: Decision, operation: Attention, writer: Writer, gradients: bool, actions: Actions,
    hooks: Hooks, recording: Recording | None,
) -> dict[fx.Node, fx.Node]:  # fmt: skip
    axes, dtype = operation.axes, attention_dtype(operation)
    found = operands(operation, writer)
    arrange, heads, inputs = found.arrange, found.heads, found.inputs
    grid = (operation.batch, heads, operation.rows, operation.keys)
    if operation.dropout:
        device = graph.value(operation.output).device
        inputs["seed"] = writer.call(torch.randint, 0, 2**31 - 1, (1,), dtype=torch.int64, device=device)
        inputs["dropout_p"] = operation.dropout
    call = None
    if decision.own_action:
        output = _by_action(decision, operation, writer, actions, list(found.qkv), inputs)
    else:
        inputs |= settings(decision, operation)
        residual = decision.values["delta"] == "residual" and not decision.values["matmul"]
        if dtype in _SIXTEEN_BIT and gradients and residual:
            inputs["save_residual"] = True
        if recording is not None:
            prepare(recording, decision)
            inputs["record"] = recording.handle
            inputs |= {} if gradients else {"record_forward": True}
        qkv = (hooked(writer, decision, hooks, name, node) for name, node in zip("qkv", found.qkv, strict=True))
        call = writer.call(torch.ops.precisionpass.attention.default, *qkv, **inputs)
        output = hooked(writer, decision, hooks, "output", writer.call(operator.getitem, call, 0))
    for node, layout in operation.factors:
        factor = arrange.bring(writer.captured(node), layout, (operation.batch, heads, operation.rows, ()))
        output = writer.call(torch.mul, output, factor)
    groups = (operation.batch, heads, operation.rows, operation.values)
    output = writer.cast(output, dtype, operation.value_dtype)
    output = arrange.back(output, groups, operation.output_layout)
    if strides_matter(operation.output, axes, groups, operation.output_layout):
        output = writer.method("contiguous", output)
    results = {operation.output: output}
    if operation.probabilities:
        probabilities = writer.call(operator.getitem, call, 4)
        for node, layout in operation.probabilities:
            results[node] = writer.cast(arrange.back(probabilities, grid, layout), dtype, graph.dtype(node))
    return results


def _by_action(
    decision: Decision, operation: Attention, writer: Writer, actions: Actions, qkv: list[fx.Node], inputs: dict
) -> fx.Node:
    """O from the user's action, which gets what describes the computation and none of the settings."""
    if operation.probabilities:
        raise ActionRefuses("the probabilities are used elsewhere, and an action gives none")
    inputs |= as_arguments(operation.band, operation) or {}

    def like():
        q, _, v = map(graph.value, qkv)
        return q.new_empty((*q.shape[:3], v.shape[3]))

    return call_action(writer, decision, actions, qkv, inputs, like)
