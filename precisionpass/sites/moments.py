"""Means, mean squares and variances over dimensions of a row, in every spelling: what the norms are built from."""

import math
from dataclasses import dataclass, replace

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import uncast
from precisionpass.sites.reductions import reduction
from precisionpass.sites.scores import constant_of

LENGTHS = {aten.linalg_vector_norm, aten.linalg_norm, aten.norm}
_NOT_NEGATIVE = {aten.clamp, aten.clamp_min, aten.clip, aten.relu, aten.maximum}


@dataclass(frozen=True)
class Moment:
    """A statistic of `of` over `dims`, as dimensions of size one.

    In every function here `put_back` are the dimensions that a call further out gives back to a statistic without them.
    """

    of: fx.Node
    dims: tuple[int, ...]
    interior: frozenset[fx.Node]
    biased: bool = True


def mean(node, put_back: tuple[int, ...] = ()) -> Moment | None:
    """mean(x), sum(x) / n, sum(x) * (1 / n)."""
    average = reduced(node, {aten.mean, aten.var_mean, aten.std_mean}, put_back, part=1)
    if average is not None:
        return average
    total, interior, count = _divided(node)
    found = reduced(total, {aten.sum}, put_back)
    if found is None or not _counts(count, found):
        return None
    return replace(found, interior=found.interior | interior)


def mean_square(node, put_back: tuple[int, ...] = ()) -> Moment | None:
    """mean(x * x), sum(x ** 2) / n, |x| ** 2 / n. `of` is x."""
    average = mean(node, put_back)
    if average is not None:
        return _of_squares(average)
    total, interior, count = _divided(node)
    found = square_sum(total, put_back)
    if found is None or not _counts(count, found):
        return None
    return replace(found, interior=found.interior | interior)


def square_sum(node, put_back: tuple[int, ...] = ()) -> Moment | None:
    """sum(x * x), |x| ** 2, einsum("...d,...d->...", x, x). `of` is x."""
    total = reduced(node, {aten.sum}, put_back)
    if total is not None:
        return _of_squares(total)
    length = reduced(square(node), LENGTHS, put_back)
    if length is not None:
        return replace(length, interior=length.interior | {node})
    return reduced(node, {aten.einsum}, put_back)


def _of_squares(moment: Moment) -> Moment | None:
    """The mean or sum of squares of what a mean or sum's values are the squares of."""
    squared = square(moment.of)
    return None if squared is None else replace(moment, of=squared, interior=moment.interior | {moment.of})


def root_mean_square(node, put_back: tuple[int, ...] = ()) -> Moment | None:
    """|x| / sqrt(n)."""
    length, interior, count = _divided(node)
    found = reduced(length, LENGTHS, put_back)
    if found is None or not isinstance(count, int | float) or not _counts(count * count, found):
        return None
    return replace(found, interior=found.interior | interior)


def square(node):
    """x where the node is x * x, x ** 2 or square(x)."""
    kind = graph.packet(node) if isinstance(node, fx.Node) else None
    if kind is aten.square or (kind is aten.pow and constant_of(node.args[1]) == 2):
        return uncast(node.args[0])
    if kind is aten.mul and uncast(node.args[0]) is uncast(node.args[1]):
        return uncast(node.args[0])
    return None


def variance(node, put_back: tuple[int, ...] = ()) -> Moment | None:
    """var(x), var_mean(x)[0], mean((x - mean(x)) ** 2), mean(x ** 2) - mean(x) ** 2; kept from being negative."""
    if not isinstance(node, fx.Node):
        return None
    kind = graph.packet(node)
    if kind in _NOT_NEGATIVE and (kind is aten.relu or (len(node.args) == 2 and constant_of(node.args[1]) == 0)):
        inside = variance(node.args[0], put_back)
        return inside and replace(inside, interior=inside.interior | {node})
    found = reduced(node, {aten.var, aten.var_mean}, put_back)
    if found is not None:
        return found
    if kind is aten.sub:
        squares, centre = mean_square(node.args[0], put_back), square(node.args[1])
        average = mean(centre, put_back)
        if squares and average and squares.of is average.of and squares.dims == average.dims:
            return Moment(squares.of, squares.dims, squares.interior | average.interior | {node, node.args[1]})  # type: ignore[operator]
        return None
    squares = mean_square(node, put_back)
    row = centred(squares.of) if squares else None
    if squares and row and row.dims == squares.dims:
        return Moment(row.of, row.dims, squares.interior | row.interior)
    return None


def deviation(node, put_back: tuple[int, ...] = ()) -> Moment | None:
    """std(x), std_mean(x)[0]."""
    return reduced(node, {aten.std, aten.std_mean}, put_back)


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


def reduced(node, kinds: set, put_back: tuple[int, ...] = (), part: int = 0) -> Moment | None:
    """A reduction of one of these kinds as a moment."""
    found = reduction(node, kinds, put_back, part)
    return found and Moment(found.of, found.dims, found.interior, _biased(found.call))


def _divided(node) -> tuple[object, frozenset[fx.Node], object]:
    """(total, the division, count) of total / count or total * (1 / count)."""
    kind = graph.packet(node)
    if kind not in (aten.div, aten.mul):
        return None, frozenset(), None
    for total, number in (node.args[:2], node.args[1::-1]):
        value = constant_of(number)
        if value and (kind is aten.mul or total is node.args[0]):
            return total, frozenset({node}), value if kind is aten.div else 1 / value
    return None, frozenset(), None


def _counts(count, moment: Moment) -> bool:
    """Whether a number is how many elements the statistic is of."""
    sizes = [graph.shape(moment.of)[d] for d in moment.dims]
    plain = all(isinstance(size, int) for size in sizes) and isinstance(count, int | float)
    return plain and math.isclose(count, math.prod(sizes), rel_tol=1e-6)


def _biased(node: fx.Node) -> bool:
    if graph.packet(node) not in (aten.var, aten.var_mean, aten.std, aten.std_mean):
        return True
    named = graph.arguments(node)
    return named.get("unbiased") is False or named.get("correction", 1) == 0
