"""A row divided by a root, in every spelling: row * (statistic + eps) ** -0.5; where eps stands, a weight inside."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import CASTS, casts_between, uncast
from precisionpass.sites.moments import deviation, root_mean_square
from precisionpass.sites.scores import constant_of

_CLAMPS = {aten.clamp, aten.clamp_min, aten.clip}


@dataclass
class Root:
    """A root and what it is taken of. interior: the calls from the root down to, not including, the statistic."""

    interior: set[fx.Node] = field(default_factory=set)
    statistic: fx.Node | None = None
    eps: object = 0.0
    is_statistic: bool = False  # the statistic is a standard deviation or a root mean square: a root itself
    put_back: tuple[int, ...] = ()  # dimensions that the statistic lacks and its root gets back, outermost call first
    outside: bool = False  # an eps is added to the root, or the root is kept from being smaller

    def passed(self, node):
        """The node behind casts and new dimensions of size one."""
        while graph.packet(node) in CASTS or graph.packet(node) is aten.unsqueeze:
            self.interior.add(node)
            if graph.packet(node) is aten.unsqueeze:
                self.put_back += (int(node.args[1]) % len(graph.shape(node)),)
            node = node.args[0]
        return node


@dataclass(frozen=True)
class Normalised:
    """A row divided by a root: `row` is x itself or x minus its mean. weight: multiplied into the inverse root."""

    output: fx.Node
    row: fx.Node
    root: Root
    weight: fx.Node | None = None


def normalised(node: fx.Node) -> Iterator[Normalised]:
    """Every way to read a call as row * rsqrt(v + eps), row / sqrt(v + eps), row * (v + eps) ** -0.5, row / std."""
    kind = graph.packet(node)
    if kind not in (aten.mul, aten.div) or not all(map(graph.is_tensor, (node, *node.args[:2]))):
        return
    row, other = node.args[:2]
    if kind is aten.div:
        if (root := _root(other, Root({node}))) is not None:
            yield Normalised(node, row, root)  # type: ignore[arg-type]
        return
    for row, other in (node.args[:2], node.args[1::-1]):
        for inverse, weight in _weighted(other):
            if (root := _inverse_root(inverse)) is not None:
                root.interior |= (
                    {node} if weight is None else {node, uncast(other), *casts_between(other, uncast(other))}
                )
                yield Normalised(node, row, root, weight)  # type: ignore[arg-type]


def _weighted(node) -> Iterator[tuple[object, fx.Node | None]]:
    """(node, None), and for a product of two tensors each of them with the other as the weight."""
    yield node, None
    bare = uncast(node)
    if graph.packet(bare) is aten.mul and all(map(graph.is_tensor, bare.args[:2])):
        yield bare.args[:2]  # type: ignore[misc]
        yield bare.args[1::-1]  # type: ignore[misc]


def _inverse_root(node) -> Root | None:
    """rsqrt(x), x ** -0.5, 1 / root, root.reciprocal()."""
    root = Root()
    node = root.passed(node)
    kind = graph.packet(node)
    root.interior.add(node)
    if kind is aten.rsqrt or (kind is aten.pow and constant_of(node.args[1]) == -0.5):
        return _inside(node.args[0], root)
    if kind is aten.mul and constant_of(node.args[1]) == 1:  # as 1 / x has it
        node = node.args[0]
        kind = graph.packet(node)
        root.interior.add(node)
    if kind is aten.reciprocal:
        return _root(node.args[0], root)
    if kind is aten.div and constant_of(node.args[0]) == 1:
        return _root(node.args[1], root)
    return None


def _root(node, root: Root) -> Root | None:
    """sqrt(x), x ** 0.5, a standard deviation, |x| / sqrt(n); with an eps added to it, or clamped from below."""
    node = root.passed(node)
    if graph.packet(node) is aten.add and (apart := _apart(node)) is not None:
        root.outside = True
        root.interior.add(node)
        node = root.passed(apart[0])
    elif graph.packet(node) in _CLAMPS:
        root.outside = True
        root.interior.add(node)
        node = root.passed(node.args[0])
    kind = graph.packet(node)
    if kind is aten.sqrt or (kind is aten.pow and constant_of(node.args[1]) == 0.5):
        root.interior.add(node)
        return _inside(node.args[0], root)
    if deviation(node, root.put_back) or root_mean_square(node, root.put_back):
        root.statistic, root.is_statistic = node, True
        return root
    return None


def _inside(node, root: Root) -> Root:
    """What the root is taken of: a statistic, or a statistic plus eps."""
    bare = uncast(node)
    if graph.packet(bare) in (aten.add, aten.add_) and (apart := _apart(bare)) is not None:
        node = root.passed(node)
        root.interior.add(bare)
        node, root.eps = apart
    root.statistic = root.passed(node)
    return root


def _apart(node: fx.Node):
    """(the tensor, the number) of a sum of both."""
    for statistic, eps in (node.args[:2], node.args[1::-1]):
        value = constant_of(eps)
        if value is None and isinstance(eps, fx.Node) and isinstance(graph.value(eps), torch.SymFloat):
            value = eps
        if value is not None and graph.is_tensor(statistic):
            return statistic, value
    return None
