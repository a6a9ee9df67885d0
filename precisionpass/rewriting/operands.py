"""What an attention op reads, brought into its layout: q, k, v, and everything between Q K^T and the softmax."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

from precisionpass import graph
from precisionpass.rewriting.arrange import Arranger
from precisionpass.rewriting.writer import Writer
from precisionpass.score import expression
from precisionpass.sites.axes import Layout
from precisionpass.sites.describe import attention_dtype
from precisionpass.sites.site import Attention


@dataclass(frozen=True)
class Operands:
    """qkv: new nodes [B, H or Hk, S, D]. inputs: the op's other tensors and numbers, by name. heads: their axes."""

    qkv: tuple[fx.Node, fx.Node, fx.Node]
    inputs: dict[str, object]
    heads: tuple[int, ...]
    arrange: Arranger


def operands(operation: Attention, writer: Writer) -> Operands:
    """Write the calls that bring a site's operands into the op's layout. Raises CannotPlace."""
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
    inputs = _score(operation, arrange, (operation.batch, heads, operation.rows, operation.keys))
    if operation.sink is not None:
        inputs["sinks"] = _sinks(operation, arrange, (operation.batch, heads, operation.rows, ()))
    return Operands((q, k, v), inputs, heads, arrange)


def _sinks(operation: Attention, arrange: Arranger, grid: Layout) -> fx.Node:
    """One logit a row, of several the one that counts for all of them, as [B or 1, H or 1, S or 1, 1]."""
    assert operation.sink is not None
    (sink, layout), writer = operation.sink, arrange.writer
    if not isinstance(sink, fx.Node):
        like = graph.value(operation.output)
        return writer.call(torch.full, (1, 1, 1, 1), sink, dtype=attention_dtype(operation), device=like.device)
    logit = writer.captured(sink)
    if graph.shape(sink)[-1] != 1:
        wide = torch.promote_types(graph.dtype(sink), torch.float32)
        logit = writer.method("logsumexp", writer.cast(logit, graph.dtype(sink), wide), -1, True)
    return arrange.bring(logit, layout, grid)


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
        condition = expression.read(position) in conditions
        if not graph.dtype(node).is_floating_point and not condition:
            reads[position] = writer.method("to", tensor, torch.float32)  # a boolean that is added counts as 0 or 1
        elif condition and graph.dtype(node) != torch.bool:
            reads[position] = writer.method("to", tensor, torch.bool)  # a mask of 0 and 1
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
