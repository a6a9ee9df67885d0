"""Small questions about FX nodes that several stages ask."""

import torch
from torch import fx


def value(node: fx.Node):
    """What the node computes, as traced: a fake tensor, a symbolic number, a tuple of these, or None."""
    return node.meta.get("val", node.meta.get("example_value"))


def is_tensor(node) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def dtype(node: fx.Node) -> torch.dtype:
    return value(node).dtype


def shape(node: fx.Node) -> torch.Size:
    return value(node).shape


def storage(node: fx.Node) -> int:
    """Identity of the memory behind a traced tensor: equal for a tensor and its views."""
    return value(node).untyped_storage()._cdata


def same_size(a, b) -> bool:
    """Whether two sizes are provably equal.

    Symbolic sizes are compared as expressions: today's hint is never evidence and no guard is added.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return expression(a) == expression(b)


def expression(size):
    """The sympy expression of a symbolic number; a plain number as it is."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else size


def arguments(node: fx.Node) -> dict:
    """Arguments of an ATen call by schema name, defaults filled in.

    Trailing defaults vanish while tracing; reading them through the schema is the only reliable way.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    named = {}
    for position, argument in enumerate(schema.arguments):
        if argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        elif position < len(node.args) and not argument.kwarg_only:
            named[argument.name] = node.args[position]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


def packet(node):
    """The operator without its overload (`aten.add` for `aten.add.Tensor`) or the target itself; None for no call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    return getattr(node.target, "overloadpacket", node.target)


def is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def mutated(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an in-place call writes to."""
    if not is_mutable(node):
        return []
    written = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    found = [arguments(node)[name] for name in written]
    return [n for n in found if isinstance(n, fx.Node)]


def hint(size) -> int:
    """Today's value of a size, without a guard: for choices that change no result. 1 where there is none."""
    known = size.node.hint if isinstance(size, torch.SymInt) else size
    return 1 if known is None else int(known)
