"""The facts of a site and the formula that a reviewer reads."""

import sympy
import torch
from torch import fx

from precisionpass import graph
from precisionpass.score import expression
from precisionpass.sites.anchors import SoftmaxAnchor
from precisionpass.sites.band import as_arguments, with_band
from precisionpass.sites.site import Attention, Operand, Site

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def short(dtype: torch.dtype) -> str:
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def attention_site(
    operation: Attention, interior: frozenset[fx.Node], anchor: fx.Node, notes, softmax: SoftmaxAnchor | None = None
) -> Site:
    """The site with its facts. Sizes are numbers or sympy expressions over the captured symbols."""
    operation = with_band(operation)
    axes, parts = operation.axes, expression.take_apart(operation.score)
    batch, kv_heads = (axes.size(a) for a in (operation.batch, operation.kv_heads))
    band = as_arguments(operation.band, operation) or {}
    facts = {
        "dtype": short(attention_dtype(operation)),
        "device": graph.value(operation.output).device.type,
        "statistics": short(softmax.statistics if softmax else torch.float32),
        "batch": batch,
        "heads": kv_heads * axes.size(operation.group),
        "kv_heads": kv_heads,
        "seq_q": axes.size(operation.rows),
        "seq_k": axes.size(operation.keys),
        "head_dim": axes.size(operation.inner),
        "value_dim": axes.size(operation.values),
        "causal": "causal" in band,
        "window": int(band["window_left"]) + 1 + int(band.get("window_right", 0)) if "window_left" in band else 0,  # type: ignore[call-overload]
        "masked": bool(expression.reads(operation.score)),
        "dropout": operation.dropout,
        "softcap": float(parts.softcap) if parts.softcap.is_Number else 0.0,
    }
    return Site("attention", operation, interior, facts, attention_formula(operation), anchor, notes)


def attention_dtype(operation: Attention) -> torch.dtype:
    """The format that the op computes in: the widest that the model's own products read, autocast included.

    Where the model multiplies BF16 tensors in FP32 so does the op, or its gradients would be less exact than before.
    """
    products = (
        (operation.q, operation.product_dtype),
        (operation.k, operation.product_dtype),
        (operation.v, operation.value_dtype),
    )
    first, *others = [_read_in(operand, dtype) for operand, dtype in products]
    for other in others:
        first = torch.promote_types(first, other)  # bf16 and fp16 meet in fp32
    return first


def _read_in(operand: Operand, product: torch.dtype) -> torch.dtype:
    """The format in which a product reads an operand: its own, or under autocast the product's."""
    own = operand.dtype
    return product if product.itemsize < own.itemsize else own


def attention_formula(operation: Attention) -> str:
    names = {}
    for position, (node, layout) in enumerate(operation.reads):
        names[expression.read(position)] = sympy.Symbol(f"{name_of(node)}[{_indices(operation, layout)}]")
    for name, node in operation.numbers.items():
        names[sympy.Symbol(name, real=True)] = sympy.Symbol(name_of(node))
    names[expression.RAW] = sympy.Symbol("QK^T")
    score = expression.formula(operation.score, names)
    high, low = operation.band.high, operation.band.low
    causal = "" if high is None else ", j <= i" if high == 0 else f", j <= i + {high}"
    causal += "" if low is None else f", j >= i - {-low}"
    sink = ""
    if operation.sink is not None:
        logit = operation.sink[0]
        sink = f", sink {name_of(logit) if isinstance(logit, fx.Node) else f'{logit:g}'}"
    inside = f"softmax({score}{causal}{sink})"
    if operation.dropout:
        inside = f"dropout({inside}, {operation.dropout:g})"
    factors = "".join(f" * {name_of(node)}" for node, _ in operation.factors)
    return f"{inside} V{factors}"


def name_of(node: fx.Node) -> str:
    """The user's name of a value where the captured graph has it, else the operation's."""
    if "captured" not in node.meta and (written := graph.mutated(node)):
        return name_of(written[0])
    return node.meta.get("captured", node.name)


def _indices(operation: Attention, layout) -> str:
    present = {a for dim in operation.axes.layout(layout) for a in dim}
    groups = (
        ("b", operation.batch),
        ("h", (*operation.kv_heads, *operation.group)),
        ("i", operation.rows),
        ("j", operation.keys),
    )
    return ",".join(letter for letter, axes in groups if present & set(operation.axes.finest(axes))) or "1"
