"""The attention op in place of a site's calls."""

import operator
from collections.abc import Mapping
from dataclasses import fields

import sympy
import torch
from torch import fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.ops.arguments import AttentionArguments
from precisionpass.ops.capabilities import shift_limit
from precisionpass.rewriting.arrange import Arranger, strides_matter
from precisionpass.rewriting.own import Actions, call_action
from precisionpass.rewriting.writer import ActionRefuses, Placed, ShiftTooLarge, Writer
from precisionpass.score import expression
from precisionpass.shadow import Shadow
from precisionpass.sites.band import as_arguments
from precisionpass.sites.describe import attention_dtype, short
from precisionpass.sites.site import Attention

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_DEFAULTS = {field.name: field.default for field in fields(AttentionArguments)}


def write_attention(decision: Decision, shadow: Shadow, wants_gradients: bool, actions: Actions) -> Placed:
    """Replace the site by one call of torch.ops.precisionpass.attention, or of the user's action in its place.

    Raises CannotPlace, the graph as it was.
    """
    site, operation = decision.site, decision.site.operation
    assert isinstance(operation, Attention)
    writer = Writer(shadow, operation.output)
    try:
        gradients = wants_gradients and bool(operation.output.meta.get("grad"))
        results = _results(decision, operation, writer, gradients, actions)
        return writer.replace(site.interior, results)
    except Exception:
        writer.undo()
        raise


def _results(
    decision: Decision, operation: Attention, writer: Writer, gradients: bool, actions: Actions
) -> dict[fx.Node, fx.Node]:
    axes, dtype = operation.axes, attention_dtype(operation)
    heads = (*operation.kv_heads, *operation.group)
    places = [(shadowed, layout) for o in (operation.q, operation.k, operation.v) for shadowed, layout in o.places]
    sizes = [(writer.shadow.source[n], layout) for n, layout in places if n in writer.shadow.source]
    arrange = Arranger(writer, axes, [(n, layout) for n, layout in sizes if n < writer.before])
    q, k, v = (
        arrange.operand(operand, (operation.batch, head, row, width), dtype)
        for operand, head, row, width in (
            (operation.q, heads, operation.rows, operation.inner),
            (operation.k, operation.kv_heads, operation.keys, operation.inner),
            (operation.v, operation.kv_heads, operation.keys, operation.values),
        )
    )
    grid = (operation.batch, heads, operation.rows, operation.keys)
    inputs = _score(operation, arrange, grid)
    if operation.sink is not None:
        node, layout = operation.sink
        inputs["sinks"] = arrange.bring(writer.captured(node), layout, (operation.batch, heads, operation.rows, ()))
    if operation.dropout:
        device = graph.value(operation.output).device
        inputs["seed"] = writer.call(torch.randint, 0, 2**31 - 1, (1,), dtype=torch.int64, device=device)
        inputs["dropout_p"] = operation.dropout
    call = None
    if decision.own_action:
        output = _by_action(decision, operation, writer, actions, [q, k, v], inputs)
    else:
        inputs |= settings(decision, operation)
        residual = decision.values["delta"] == "residual" and not decision.values["matmul"]
        if dtype in _SIXTEEN_BIT and gradients and residual:
            inputs["save_residual"] = True
        call = writer.call(torch.ops.precisionpass.attention.default, q, k, v, **inputs)
        output = writer.call(operator.getitem, call, 0)
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


def settings(decision: Decision, operation: Attention) -> dict[str, object]:
    """The op's own names for what the rules set; what is at the op's default is left out."""
    values: Mapping = decision.values
    chosen: dict[str, object] = {name: values[name] for name in ("normaliser", "delta", "deterministic")}
    chosen["implementation"] = values["implementation"]
    same = "zero" if operation.safe_softmax else "nan"
    chosen["dead_rows"] = same if values["dead_rows"] == "same" else values["dead_rows"]
    if values["row_max_shift"]:
        shift, dtype = values["row_max_shift"], attention_dtype(operation)
        in_fp8 = bool(values["matmul"]) and values["matmul"]["pv"] != "same"
        most = shift_limit(dtype, in_fp8)
        if shift["limit"] > most:
            room = "a P in FP8" if in_fp8 else short(dtype)
            raise ShiftTooLarge(f"limit {shift['limit']:g}, and {room} has room for {most:g}")
        chosen["row_max_shift"] = [float(shift["beta"]), float(shift["limit"]), float(shift["tolerance"])]
    if values["matmul"]:
        named = {name: values["matmul"][name] for name in ("qk", "pv", "scale")}
        chosen["matmul"] = " ".join(f"{name}={value}" for name, value in named.items() if value != "same")
    if values["logit_clip"]:
        chosen |= {"logit_clip": values["logit_clip"]["kind"], "logit_clip_max": float(values["logit_clip"]["max"])}
    if values["output_clip"]:
        chosen["output_clip"] = float(values["output_clip"])
    if values["grad_clip"]:
        clip = values["grad_clip"]
        chosen |= {
            "grad_clip_kind": clip["kind"],
            "grad_clip": float(clip["max"]),
            "on_nonfinite": clip["on_nonfinite"],
        }
    chosen |= as_arguments(operation.band, operation) or {}
    if operation.probabilities_stage != "none":
        chosen["probabilities"] = operation.probabilities_stage
    return {name: value for name, value in chosen.items() if value != _DEFAULTS[name]}


def _score(operation: Attention, arrange: Arranger, grid) -> dict[str, object]:
    """scale, softcap, bias, mask and, for what is none of these, the general score expression."""
    writer, parts = arrange.writer, expression.take_apart(operation.score)
    conditions = {where.args[0] for where in operation.score.atoms(expression.Where)}
    reads = {
        position: arrange.bring(writer.captured(operation.reads[position][0]), operation.reads[position][1], grid)
        for position in expression.reads(operation.score)
    }
    for position, tensor in reads.items():
        node = operation.reads[position][0]
        if not graph.dtype(node).is_floating_point and expression.read(position) not in conditions:
            reads[position] = writer.method("to", tensor, torch.float32)  # a boolean that is added counts as 0 or 1
    biases = sorted(parts.biases, key=lambda p: -len([d for d in operation.axes.layout(operation.reads[p][1]) if d]))
    score, scale, softcap = parts.score, parts.scale, parts.softcap
    if len(biases) > 1 and softcap != 0:  # the further biases come after the softcap: all of it is written out
        score, softcap = softcap * expression.Tanh(scale / softcap * expression.RAW), sympy.Integer(0)
        scale = sympy.Integer(1)
    for position in biases[1:]:
        score = score + expression.read(position)
    symbols = {name: node for name, node in operation.numbers.items() if score.has(sympy.Symbol(name, real=True))}
    result: dict[str, object] = {"scale": writer.number(scale, operation.numbers)}
    if softcap != 0:
        result["softcap"] = float(softcap)
    if score != expression.RAW:
        renamed, inputs = {}, []
        for position in expression.reads(score):
            renamed[expression.read(position)] = expression.read(len(inputs))
            inputs.append(reads[position])
        for name, node in symbols.items():
            renamed[sympy.Symbol(name, real=True)] = expression.read(len(inputs))
            inputs.append(writer.call(torch.full, (1, 1, 1, 1), writer.captured(node)))
        result |= {"score": expression.text(score, renamed), "score_inputs": inputs}
    if biases:
        result["bias"] = reads[biases[0]]
    for position, allowed in parts.masks:
        mask = reads[position] if allowed else writer.call(torch.logical_not, reads[position])
        result["mask"] = writer.call(torch.logical_and, result["mask"], mask) if "mask" in result else mask
    return result
