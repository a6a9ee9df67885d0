"""Attention that the model already calls by name."""

import math

import torch
from torch import fx

from precisionpass import graph
from precisionpass.score import expression
from precisionpass.sites.axes import Axes
from precisionpass.sites.operands import operand
from precisionpass.sites.scores import Scores
from precisionpass.sites.site import Attention, Band, Refused


def read_call(node: fx.Node) -> Attention:
    """A scaled_dot_product_attention call: q [..., H, Sq, D], k [..., Hk, Sk, D], v [..., Hk, Sk, Dv]."""
    named = graph.arguments(node)
    q, k, v = named["query"], named["key"], named["value"]
    axes, rank = Axes(), len(graph.shape(node))
    shape = graph.shape(node)
    batch = [axes.new(size) for size in shape[:-2]]
    grouped = bool(named["enable_gqa"]) and rank >= 3
    kv = [list(batch) for _ in range(2)]
    if grouped:
        for entries, side in zip(kv, (k, v), strict=True):
            entries[-1] = _key_heads(axes, batch[-1], shape[-3], graph.shape(side)[-3])
    rows, keys = axes.new(graph.shape(q)[-2]), axes.new(graph.shape(k)[-2])
    inner, width = axes.new(graph.shape(q)[-1]), axes.new(graph.shape(v)[-1])
    scores = Scores(axes, (*batch, rows, keys))
    mask = named["attn_mask"]
    default = 1 / math.sqrt(graph.shape(q)[-1]) if named["scale"] is None else None
    scores.scale(named["scale"] if default is None else default)
    q_at = operand(axes, q, _own(axes, q, (*batch, rows, inner)), scores)
    k_at = operand(axes, k, _own(axes, k, (*kv[0], keys, inner)), scores)
    v_at = operand(axes, v, _own(axes, v, (*kv[1], keys, width)), None)
    if mask is not None:
        read = scores.read(mask)
        is_mask = graph.dtype(mask) == torch.bool
        scores.expression = (
            expression.Where(read, scores.expression, -expression.INFINITY) if is_mask else scores.expression + read
        )
    depends = {a for side in (k_at, v_at) for dim in axes.layout(side.places[-1][1]) for a in dim}
    over = [a for dim in axes.layout(tuple(batch)) for a in dim]
    shared = tuple(a for a in over if a in depends)
    first = axes.finest(batch[0]) if len(batch) > 1 else ()
    return Attention(
        axes=axes, q=q_at, k=k_at, v=v_at, batch=tuple(a for a in shared if a in first),
        kv_heads=tuple(a for a in shared if a not in first), group=tuple(a for a in over if a not in shared), rows=rows,
        keys=keys, inner=axes.finest(inner), values=width, score=scores.expression, reads=tuple(scores.reads),
        numbers=scores.numbers, factors=(), output=node, output_layout=axes.layout((*batch, rows, width)),
        product_dtype=graph.dtype(node), value_dtype=graph.dtype(node), safe_softmax=True,
        band=Band(high=0) if named["is_causal"] else Band(), dropout=float(named["dropout_p"]),
    )  # fmt: skip


def _key_heads(axes: Axes, heads: tuple[int, ...], query_heads, key_heads) -> tuple[int, ...]:
    """The axis of the key heads: query head h reads key head h // (query heads // key heads)."""
    if graph.same_size(query_heads, key_heads):
        return heads
    if graph.expression(key_heads) == 1:
        return ()
    parts = axes.regroup((heads,), (key_heads, query_heads // key_heads))
    if parts is None:
        raise Refused("layout_not_followed", "the key heads do not divide the query heads")
    return parts[0]


def _own(axes: Axes, node: fx.Node, layout):
    """An operand's own layout: nothing where it is broadcast, and fewer leading dimensions than the result."""
    shape = graph.shape(node)
    layout = axes.layout(layout)[len(layout) - len(shape) :]
    return tuple(() if graph.expression(size) == 1 else dim for dim, size in zip(layout, shape, strict=True))
