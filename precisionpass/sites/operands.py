"""The operands of an attention by its axes: which are batch, heads, rows, keys; and where q, k, v come from."""

from dataclasses import replace

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.score import expression
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.axes import VIEWS, Axes, Layout
from precisionpass.sites.contraction import Contraction
from precisionpass.sites.scores import Scores, constant_of
from precisionpass.sites.site import Attention, Operand, Refused


def name_axes(axes: Axes, entries: dict[str, tuple[int, ...]], side: fx.Node, labels) -> Layout:
    """Give each label of an operand its axis, where it has none yet; the operand's own layout."""
    layout = []
    for label, size in zip(labels, graph.shape(side), strict=True):
        alone = graph.expression(size) == 1
        if not entries.get(label):
            entries[label] = axes.new(size)
        layout.append(() if alone else entries[label])
    return tuple(layout)


def assemble(axes: Axes, entries, product: Contraction, scores: Scores, value: Contraction, p_layout: Layout, factors,
             keys: tuple[int, ...], safe: bool) -> Attention:  # fmt: skip
    """Give every axis its part. Raises Refused where the parts are not those of an attention."""
    if not product.summed:
        raise Refused("no_query_key_product", "nothing is summed over")
    left, right = (
        _flat(axes, name_axes(axes, entries, side, labels))
        for side, labels in ((product.left, product.left_labels), (product.right, product.right_labels))
    )
    if not set(keys) <= right - left and set(keys) <= left - right:
        product, left, right = product.swapped(), right, left
    if not set(keys) <= right - left:
        raise Refused("softmax_over_other_axis")
    inner = tuple(a for label in product.summed for a in entries[label])
    if right - left != set(keys):
        raise Refused("softmax_over_other_axis", "only a part of the keys is normalised together")
    q = operand(axes, product.left, name_axes(axes, entries, product.left, product.left_labels), scores)
    k = operand(axes, product.right, name_axes(axes, entries, product.right, product.right_labels), scores)
    if k.places[-1][0].meta.get("parameter") and len(k.places[-1][1]) <= 2:
        raise Refused("no_query_key_product", "the keys are a weight")
    v_entries = dict(zip(value.left_labels, p_layout, strict=True))
    v = operand(axes, value.right, name_axes(axes, v_entries, value.right, value.right_labels), None)
    in_v = _flat(axes, name_axes(axes, v_entries, value.right, value.right_labels)) - _flat(axes, p_layout)
    widths = [label for label in value.right_labels if label not in value.left_labels or set(v_entries[label]) & in_v]
    if len(widths) != 1 or len(set(value.labels)) != len(value.labels):
        raise Refused("no_value_product", "the values have further axes")
    keys = axes.finest(keys)
    in_p = [a for dim in axes.layout(p_layout) for a in dim if a not in keys]
    output_layout = axes.layout(tuple(v_entries.get(label, ()) for label in value.labels))
    width = axes.finest(v_entries[widths[0]])
    if any(a not in in_p and a not in width for a in _flat(axes, output_layout)):
        raise Refused("no_value_product", "the values have further axes")
    depends = _flat(axes, k.places[-1][1]) | _flat(axes, v.places[-1][1])
    shared = [a for a in in_p if a in depends]
    s_layout = axes.layout(scores.layout)
    rows = _rows([a for a in in_p if a not in depends], s_layout)
    batch = _batch(shared, s_layout)
    return Attention(
        axes=axes, q=q, k=k, v=v, batch=batch, kv_heads=tuple(a for a in shared if a not in batch),
        group=tuple(a for a in in_p if a not in shared and a not in rows), rows=rows, keys=keys,
        inner=axes.finest(inner), values=width, score=scores.expression, reads=tuple(scores.reads),
        numbers=scores.numbers,
        factors=factors, output=value.node, output_layout=output_layout, safe_softmax=safe, sink=scores.sink,
        product_dtype=graph.dtype(product.node), value_dtype=graph.dtype(value.node),
    )  # fmt: skip


def finished(operation: Attention, output: fx.Node, dropout: float, used, axes: Axes) -> Attention:
    probabilities, stage = used
    return replace(
        operation,
        output=output,
        dropout=dropout,
        probabilities=tuple((node, axes.layout(layout)) for node, layout in probabilities),
        probabilities_stage=stage,
    )


def _rows(alone: list[int], layout: Layout) -> tuple[int, ...]:
    """Of the axes that keys and values lack, those of the last dimension before the keys are the rows."""
    dims = [d for d in layout if any(a in alone for a in d)]
    return tuple(a for a in dims[-1] if a in alone) if dims else ()


def _batch(shared: list[int], layout: Layout) -> tuple[int, ...]:
    """With four dimensions or more the first is the batch; a merged first dimension gives its first axis."""
    return tuple(a for a in shared if a in layout[0]) if len(layout) >= 4 else tuple(shared[:1])


def _flat(axes: Axes, layout: Layout) -> set[int]:
    return {a for dim in axes.layout(layout) for a in dim}


def operand(axes: Axes, node: fx.Node, layout: Layout, scores: Scores | None) -> Operand:
    """Follow an operand back through views, exact casts and (for q and k) factors, which join the scale."""
    places = [(node, layout)]
    top = graph.dtype(node)
    while node.op == "call_function":
        kind = graph.packet(node)
        if kind in VIEWS:
            before = axes.pull(node, layout)
            if before is None:
                break
            layout = before
            node = node.args[0]  # type: ignore[assignment]
        elif kind in CASTS and _exact(node.args[0], top) and scores is not None:
            node = node.args[0]  # type: ignore[assignment]
        elif scores is not None and kind in (aten.mul, aten.div) and (other := _factor(node)) is not None:
            carrier, factor = other
            inverse = kind is aten.div
            if inverse and carrier is not node.args[0]:
                break
            number = expression.number(factor) if isinstance(factor, int | float) else scores.number(factor)
            scores.expression = scores.expression.subs(
                expression.RAW, expression.RAW / number if inverse else expression.RAW * number
            )
            node = carrier
            places.clear()  # the factor is in the score now: what stands after it would count it twice
        else:
            break
        places.append((node, layout))
    return Operand(tuple((n, axes.layout(lay)) for n, lay in places), top)


def _exact(node, top: torch.dtype) -> bool:
    """Whether a cast loses nothing: from a 16-bit format to a wider one (the product is summed in FP32 anyway)."""
    return (
        graph.is_tensor(node)
        and (graph.dtype(node) == top or graph.dtype(node).itemsize < top.itemsize)
        and graph.dtype(node).is_floating_point
    )


def _factor(node: fx.Node):
    """(the tensor, the number) of a product with a plain or symbolic number."""
    for carrier, other in (node.args[:2], node.args[1::-1]):
        if not graph.is_tensor(carrier) or graph.value(carrier).dim() == 0:
            continue
        constant = constant_of(other)
        if constant is not None:
            return carrier, constant
        if isinstance(other, fx.Node) and not graph.is_tensor(other):
            return carrier, other
    return None
