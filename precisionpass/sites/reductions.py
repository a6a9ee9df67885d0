"""Sums, means, maxima and norms over dimensions that stay with size one, or that are put back later."""

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import uncast

PAIRS = {aten.var_mean, aten.std_mean, aten.max}


@dataclass(frozen=True)
class Reduction:
    """One call over `dims`, ascending, of `of`. interior: the call, and what puts its dimensions back."""

    call: fx.Node
    of: fx.Node
    dims: tuple[int, ...]
    interior: frozenset[fx.Node]


def reduction(node, kinds: Collection, put_back: tuple[int, ...] = (), part: int = 0) -> Reduction | None:
    """The reduction of one of these kinds that a node is.

    put_back: dimensions that calls further out give back to it, outermost first. part: which of two results it is.
    """
    interior, back = set(), list(put_back)
    while isinstance(node, fx.Node) and graph.packet(node) is aten.unsqueeze:
        interior.add(node)
        back.append(int(node.args[1]) % len(graph.shape(node)))  # type: ignore[call-overload]
        node = node.args[0]
    if graph.packet(node) is operator.getitem and node.args[1] == part and graph.packet(node.args[0]) in PAIRS:
        interior.add(node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or graph.packet(node) not in kinds:
        return None
    kept, dims = _dims(node)
    if not dims or (back != [] if kept else tuple(reversed(back)) != dims):
        return None
    x = node.args[1][0] if graph.packet(node) is aten.einsum else node.args[0]  # type: ignore[index]
    return Reduction(node, uncast(x), dims, frozenset(interior | {node}))


def _dims(node: fx.Node) -> tuple[bool, tuple[int, ...]]:
    """(whether they are kept with size one, the reduced dimensions, ascending); none where no one can be named."""
    if graph.packet(node) is aten.einsum:
        return False, _einsum_dims(*node.args[:2])
    named = graph.arguments(node)
    dims = named.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or named.get("p", named.get("ord")) not in (None, 2):
        return False, ()
    if graph.packet(node) is aten.linalg_norm and len(dims) != 1:
        return False, ()  # of two dimensions it is a norm of matrices
    rank = len(graph.shape(node.args[0]))  # type: ignore[arg-type]
    return bool(named.get("keepdim")), tuple(sorted(int(d) % rank for d in dims))


def _einsum_dims(equation, operands) -> tuple[int, ...]:
    """The last dimension, where a tensor is multiplied with itself and summed over it."""
    left, _, rest = str(equation).replace(" ", "").partition(",")
    right, _, out = rest.partition("->")
    same = len(operands) == 2 and uncast(operands[0]) is uncast(operands[1]) and left == right
    return (len(graph.shape(operands[0])) - 1,) if same and left[-1:].isalpha() and out == left[:-1] else ()
