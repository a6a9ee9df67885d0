"""Means, mean squares and variances over dimensions of a row, in every spelling: what the norms are built from."""

import operator
from dataclasses import dataclass

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import uncast
from precisionpass.sites.scores import constant_of


@dataclass(frozen=True)
class Moment:
    """A statistic of `of` over `dims`, kept as dimensions of size one."""

    of: fx.Node
    dims: tuple[int, ...]
    interior: frozenset[fx.Node]
    biased: bool = True


def mean(node) -> Moment | None:
    """sum(x) / n or mean(x)."""
    if isinstance(node, fx.Node) and graph.packet(node) is aten.mean:
        dims = kept_dims(node)
        return None if dims is None else Moment(uncast(node.args[0]), dims, frozenset({node}))
    if isinstance(node, fx.Node) and graph.packet(node) is operator.getitem and node.args[1] == 1:
        return _of_pair(node)
    if isinstance(node, fx.Node) and graph.packet(node) is aten.div and graph.packet(node.args[0]) is aten.sum:  # type: ignore[arg-type]
        total = node.args[0]
        dims, count = kept_dims(total), constant_of(node.args[1])  # type: ignore[arg-type]
        shape = graph.shape(uncast(total.args[0]))  # type: ignore[union-attr]
        if dims is not None and len(dims) == 1 and count == shape[dims[0]]:
            return Moment(uncast(total.args[0]), dims, frozenset({node, total}))  # type: ignore[union-attr]
    return None


def mean_square(node) -> Moment | None:
    """mean(x * x), mean(x ** 2)."""
    average = mean(node)
    if average is None:
        return None
    squared = square(average.of)
    return None if squared is None else Moment(squared, average.dims, average.interior | {average.of})


def square(node):
    """x where the node is x * x, x ** 2 or square(x)."""
    kind = graph.packet(node) if isinstance(node, fx.Node) else None
    if kind is aten.square or (kind is aten.pow and constant_of(node.args[1]) == 2):
        return uncast(node.args[0])
    if kind is aten.mul and uncast(node.args[0]) is uncast(node.args[1]):
        return uncast(node.args[0])
    return None


def variance(node) -> Moment | None:
    """var(x), var_mean(x)[0], mean((x - mean(x)) ** 2), mean(x ** 2) - mean(x) ** 2."""
    if not isinstance(node, fx.Node):
        return None
    kind = graph.packet(node)
    if kind is aten.var:
        dims = kept_dims(node)
        return None if dims is None else Moment(uncast(node.args[0]), dims, frozenset({node}), _biased(node))
    if kind is operator.getitem and node.args[1] == 0:
        return _of_pair(node)
    if kind is aten.sub:
        squares, centre = mean_square(node.args[0]), square(node.args[1])
        average = mean(centre)
        if squares and average and squares.of is average.of and squares.dims == average.dims:
            return Moment(squares.of, squares.dims, squares.interior | average.interior | {node, node.args[1]})  # type: ignore[operator]
        return None
    squares = mean_square(node)
    row = centred(squares.of) if squares else None
    if squares and row and row.dims == squares.dims:
        return Moment(row.of, row.dims, squares.interior | row.interior)
    return None


def centred(node) -> Moment | None:
    """x - mean(x)."""
    if (
        not isinstance(node, fx.Node)
        or graph.packet(node) is not aten.sub
        or constant_of(graph.arguments(node)["alpha"]) != 1
    ):
        return None
    average = mean(uncast(node.args[1]))
    if average is None or average.of is not uncast(node.args[0]):
        return None
    return Moment(average.of, average.dims, average.interior | {node})


def kept_dims(node: fx.Node) -> tuple[int, ...] | None:
    """The reduced dimensions, ascending; None where they are not kept with size one or no dimension is named."""
    named = graph.arguments(node)
    dims = named.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims or not named.get("keepdim"):
        return None
    rank = len(graph.shape(node.args[0]))  # type: ignore[arg-type]
    return tuple(sorted(int(d) % rank for d in dims))


def _of_pair(node: fx.Node) -> Moment | None:
    pair = node.args[0]
    if not isinstance(pair, fx.Node) or graph.packet(pair) is not aten.var_mean:
        return None
    dims = kept_dims(pair)
    return None if dims is None else Moment(uncast(pair.args[0]), dims, frozenset({node, pair}), _biased(pair))


def _biased(node: fx.Node) -> bool:
    named = graph.arguments(node)
    return named.get("unbiased") is False or named.get("correction", 1) == 0
