"""From the softmax back to Q K^T: every operation in between, and the one score expression they make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.score import expression
from precisionpass.score.expression import RAW
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.axes import VIEWS, Axes, Layout
from precisionpass.sites.contraction import Contraction, contraction
from precisionpass.sites.site import Refused

LONGEST_WALK = 60

_ADD = {aten.add, aten.add_}
_SUB = {aten.sub, aten.sub_, aten.rsub}
_MUL = {aten.mul, aten.mul_}
_DIV = {aten.div, aten.div_, aten.true_divide}
_FILL = {aten.masked_fill, aten.masked_fill_}
_CLAMP = {aten.clamp, aten.clamp_, aten.clamp_min, aten.clamp_max, aten.clip}
_TANH = {aten.tanh, aten.tanh_}
_PUT = {aten.index_put, aten.index_put_}
_PAD = {aten.pad, aten.constant_pad_nd}


@dataclass(frozen=True)
class Walk:
    """A product and the operations that turn it into the softmax's input, innermost first."""

    product: Contraction
    steps: tuple[tuple[fx.Node, fx.Node], ...]  # (operation, the argument that carries the scores)


def walks(scores: fx.Node) -> Iterator[Walk]:
    """Every product that `scores` can be followed back to, the most direct operand first."""
    yield from _walks(scores, LONGEST_WALK)


def _walks(node, left: int) -> Iterator[Walk]:
    if not isinstance(node, fx.Node) or left == 0:
        return
    product = contraction(node)
    if product is not None and graph.packet(node) is not aten.linear:
        yield Walk(product, ())
    for carrier in carriers(node):
        for walk in _walks(carrier, left - 1):
            yield Walk(walk.product, (*walk.steps, (node, carrier)))


def carriers(node: fx.Node) -> Sequence:
    """Arguments of a score operation that may lead back to the product."""
    kind = graph.packet(node)
    if kind in CASTS | VIEWS | _TANH | _CLAMP | _FILL | _PUT | _PAD or kind is aten.neg:
        return node.args[:1]
    if kind in _ADD or kind in _MUL:
        return node.args[:2]
    if kind in _SUB or kind in _DIV:
        return node.args[:2] if kind in _SUB else node.args[:1]
    if kind is aten.where:
        return node.args[1:3]
    if kind is aten.cat:
        return node.args[0] if len(node.args[0]) == 2 else ()  # type: ignore[return-value, arg-type]
    return ()


@dataclass
class Scores:
    """The score expression while it is built, the layout it stands in and the tensors it reads."""

    axes: Axes
    layout: Layout
    expression: sympy.Expr = RAW
    reads: list[tuple[fx.Node, Layout]] = field(default_factory=list)
    numbers: dict[str, fx.Node] = field(default_factory=dict)
    sink: tuple[fx.Node | float, Layout] | None = None
    before: int = 0  # columns of the sink that stand before the scores

    def apply(self, node: fx.Node, carrier: fx.Node) -> None:
        """One operation further from the product towards the softmax. Raises Refused where it cannot be followed."""
        kind, e = graph.packet(node), self.expression
        if kind in CASTS:
            return
        if kind in VIEWS:
            layout = self.axes.push(node, self.layout)
            if layout is None:
                raise Refused("layout_not_followed", str(node.target))
            self.layout = layout
            return
        if kind is aten.cat or kind in _PAD:
            self._join_sink(node, carrier)
            return
        other = self.other
        first = carrier is node.args[0]
        named = graph.arguments(node)
        if kind in _TANH:
            self.expression = expression.Tanh(e)
        elif kind is aten.neg:
            self.expression = -e
        elif kind in _CLAMP:
            low, high = named.get("min"), named.get("max")
            low = -expression.INFINITY if low is None else other(low)
            high = expression.INFINITY if high is None else other(high)
            self.expression = expression.Clamp(e, low, high)
        elif kind in _ADD:
            alpha = self.number(named["alpha"])
            self.expression = e + alpha * other(node.args[1]) if first else alpha * e + other(node.args[0])
        elif kind in _SUB:
            whole, taken = node.args[1::-1] if kind is aten.rsub else node.args[:2]
            whole, taken = (e if argument is carrier else other(argument) for argument in (whole, taken))
            self.expression = whole - self.number(named["alpha"]) * taken
        elif kind in _MUL:
            self.expression = e * other(node.args[1] if first else node.args[0])
        elif kind in _DIV:
            if named.get("rounding_mode"):
                raise Refused("no_query_key_product", "a rounding division")
            self.expression = e / other(node.args[1])
        elif kind in _FILL:
            self.expression = expression.Where(self.read(node.args[1]), other(node.args[2]), e)
        elif kind in _PUT:
            self.expression = expression.Where(self.read(self._places(node)), other(node.args[2]), e)
        else:  # where
            chosen = [e if a is carrier else other(a) for a in node.args[1:3]]
            self.expression = expression.Where(self.read(node.args[0]), *chosen)
        self._same_shape(node)

    def exclude(self, mask: fx.Node, there: bool) -> None:
        """-inf where a mask is `there`."""
        sides = (-expression.INFINITY, self.expression) if there else (self.expression, -expression.INFINITY)
        self.expression = expression.Where(self.read(mask), *sides)

    def add(self, addend: fx.Node, beta) -> None:
        """A baddbmm's addend."""
        self.expression = self.expression + self.number(beta) * self.read(addend)

    def scale(self, alpha) -> None:
        self.expression = self.expression * self.number(alpha)

    def other(self, argument):
        constant = constant_of(argument)
        if constant is not None:
            return expression.number(constant)
        return self.read(argument) if graph.is_tensor(argument) else self.number(argument)

    def number(self, argument) -> sympy.Expr:
        if isinstance(argument, int | float):
            return expression.number(argument)
        for name, node in self.numbers.items():
            if node is argument:
                return sympy.Symbol(name, real=True)
        name = f"c{len(self.numbers)}"
        self.numbers[name] = argument
        return sympy.Symbol(name, real=True)

    def read(self, node) -> sympy.Symbol:
        layout = self.aligned(node)
        for position, (known, known_layout) in enumerate(self.reads):
            if known is node and self.axes.layout(known_layout) == layout:
                return expression.read(position)
        self.reads.append((node, layout))
        return expression.read(len(self.reads) - 1)

    def aligned(self, node: fx.Node) -> Layout:
        """The layout of a tensor that is broadcast against the scores as they stand."""
        shape = graph.shape(node)
        if len(shape) > len(self.layout):
            if any(graph.expression(size) != 1 for size in shape[: len(shape) - len(self.layout)]):
                raise Refused("scores_are_broadcast", f"{node.name} has more dimensions")
            return self.axes.layout(((),) * (len(shape) - len(self.layout)) + self._aligned_tail(shape))
        return self._aligned_tail(shape)

    def _aligned_tail(self, shape) -> Layout:
        tail = self.layout[len(self.layout) - len(shape) :] if len(shape) < len(self.layout) else self.layout
        shape = shape[len(shape) - len(tail) :]
        result = []
        for dim, size in zip(tail, shape, strict=True):
            if graph.expression(size) == 1:
                result.append(())
            elif not dim:
                raise Refused("scores_are_broadcast")
            else:
                result.append(dim)
        return self.axes.layout(tuple(result))

    def _same_shape(self, node: fx.Node) -> None:
        rank = len(graph.shape(node))
        self.layout = ((),) * (rank - len(self.layout)) + tuple(self.layout)

    def _places(self, node: fx.Node) -> fx.Node:
        """The boolean mask over the last dimensions that a number is put at: scores[..., mask] = number."""
        named = graph.arguments(node)
        *before, mask = named["indices"]
        whole = graph.is_tensor(mask) and len(before) + len(graph.shape(mask)) == len(self.layout)
        if not whole or any(before) or graph.dtype(mask) != torch.bool or constant_of(named["values"]) is None:
            raise Refused("no_query_key_product", "scores put at some places")
        return mask

    def take_sink(self, sink: fx.Node | float, keys: Sequence[int] = ()) -> None:
        """A logit whose exponential is added to the sum over the keys, one for all of them."""
        if self.sink is not None:
            raise Refused("no_query_key_product", "scores joined with others")
        layout = self.aligned(sink) if isinstance(sink, fx.Node) else ()
        if any(axis in keys for dim in layout for axis in dim):
            raise Refused("weighted_normaliser", "each key is divided by another sum")
        self.sink = (sink, layout)

    def _join_sink(self, node: fx.Node, carrier: fx.Node) -> None:
        """Further columns beside the scores, which the softmax sees and V does not."""
        last = len(self.layout) - 1
        named = graph.arguments(node)
        joined = Refused("no_query_key_product", "scores joined with others")
        if graph.packet(node) in _PAD:
            before, *after = named["pad"]
            if sorted((before, *after)) != [0, 1] or named.get("mode", "constant") != "constant":
                raise joined
            self.take_sink(float(named["value"] or 0))
            self.before = int(before)
            return
        tensors, dim = node.args[0], named["dim"]
        if self.sink is not None or dim not in (-1, last) or len(set(tensors)) != 2:  # type: ignore[arg-type]
            raise joined
        sink = next(t for t in tensors if t is not carrier)  # type: ignore[union-attr]
        columns = graph.shape(sink)[-1]
        if not isinstance(columns, int):
            raise joined
        self.sink = (sink, self._aligned_tail((*graph.shape(sink)[:-1], 1)))
        self.before = columns if tensors[1] is carrier else 0  # type: ignore[index]


def constant_of(node) -> float | int | None:
    """The value of a number, or of a tensor without dimensions that is built from numbers alone."""
    if isinstance(node, bool):
        return None
    if isinstance(node, int | float):
        return node
    if not graph.is_tensor(node) or graph.value(node).dim() != 0:
        return None
    kind = graph.packet(node)
    if kind in (aten.full, aten.scalar_tensor):
        fill = node.args[-1] if kind is aten.full else node.args[0]
        return fill if isinstance(fill, int | float) and not isinstance(fill, bool) else None
    if kind in (aten.zeros, aten.ones):
        return 0.0 if kind is aten.zeros else 1.0
    if kind in CASTS or kind in (aten.lift_fresh_copy, aten.detach, aten.detach_, aten.clone, aten.alias):
        return constant_of(node.args[0])
    if kind in (aten.sqrt, aten.rsqrt, aten.mul, aten.div, aten.pow, aten.neg, aten.reciprocal):
        values = [constant_of(a) for a in node.args]
        if all(v is not None for v in values):
            return float(node.target(*(torch.tensor(values[0], dtype=torch.float64), *values[1:])))
    return node.meta.get("constant")
