"""Masks that the graph builds from positions: which keys a row may see, as a band low <= j - i <= high.

arange, comparisons, tril, triu, and, or, not, where, masked_fill and arithmetic with numbers are evaluated symbolically
over the dimensions of the mask. A mask that comes from an input or a buffer stays a tensor: its content can change.
"""

from dataclasses import dataclass, replace

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.axes import EXPANDS, PERMUTES, RESHAPES, permutation
from precisionpass.sites.scores import constant_of

INFINITE = float("inf")


@dataclass(frozen=True)
class Position:
    """An integer tensor: start + sum of step * index over some dimensions."""

    start: object
    steps: tuple[tuple[int, int], ...] = ()  # (dimension, step)


@dataclass(frozen=True)
class Pattern:
    """A tensor of two values: `inside` where low <= index[key] - index[row] <= high, else `outside`."""

    inside: float
    outside: float
    row: int = -1
    key: int = -1
    low: object = -INFINITE
    high: object = INFINITE

    @property
    def constant(self) -> bool:
        return self.row < 0

    def mapped(self, function) -> "Pattern":
        return replace(self, inside=function(self.inside), outside=function(self.outside))

    def moved(self, places) -> "Pattern | None":
        """The same after dimensions have moved: `places` maps old to new; None where one of them is lost."""
        if self.constant:
            return self
        if self.row not in places or self.key not in places:
            return None
        return replace(self, row=places[self.row], key=places[self.key])


def pattern_of(node) -> Pattern | None:
    """The two-valued pattern that a mask holds, or None where it cannot be told from the graph."""
    found = _evaluate(node, {})
    return found if isinstance(found, Pattern) else None


def _evaluate(node, known: dict):
    if not isinstance(node, fx.Node):
        return Pattern(node, node) if isinstance(node, int | float) else None
    if node not in known:
        known[node] = None  # a cycle cannot be; a failure is remembered
        known[node] = _one(node, known)
    return known[node]


def _one(node: fx.Node, known: dict):
    kind = graph.packet(node)
    constant = constant_of(node)
    if constant is not None:
        return Pattern(constant, constant)
    if node.op != "call_function" or not graph.is_tensor(node) or graph.is_mutable(node):
        return None
    if kind is aten.arange:
        named = graph.arguments(node)
        start, step = named.get("start", 0), named.get("step", 1)
        plain = isinstance(start, int) and isinstance(step, int)
        return Position(start, ((0, step),)) if plain else None
    if kind in (aten.ones, aten.zeros, aten.full, aten.ones_like, aten.zeros_like, aten.full_like):
        value = node.args[1] if kind in (aten.full, aten.full_like) else float(kind in (aten.ones, aten.ones_like))
        value = constant_of(value)
        return None if value is None else Pattern(value, value)
    if kind in CASTS or kind in RESHAPES or kind in PERMUTES or kind in EXPANDS or kind is aten.slice:
        return _viewed(node, _evaluate(node.args[0], known))
    if kind in (aten.tril, aten.triu):
        return _triangle(node, _evaluate(node.args[0], known))
    operands = [_aligned(a, node, known) for a in node.args if isinstance(a, fx.Node | int | float)]
    if any(operand is None for operand in operands):
        return None
    return _combined(node, kind, operands)


def _combined(node: fx.Node, kind, operands):
    if kind in _COMPARISONS and all(isinstance(o, Position) or o.constant for o in operands):
        return _compared(kind, *(o if isinstance(o, Position) else Position(o.inside) for o in operands))
    if kind in (aten.add, aten.sub) and any(isinstance(o, Position) for o in operands):
        return _shifted(kind, *operands) if constant_of(graph.arguments(node)["alpha"]) == 1 else None
    if any(isinstance(o, Position) for o in operands):
        return None
    if kind in (aten.logical_not, aten.bitwise_not):
        return operands[0].mapped(lambda v: float(not v))
    if kind in (aten.where, aten.masked_fill):
        condition, yes, no = operands if kind is aten.where else (operands[1], operands[2], operands[0])
        return _chosen(condition, yes, no)
    if kind in _ARITHMETIC and len(operands) == 2:
        first, second = operands
        if kind in _AND and not (first.constant or second.constant):
            return _both(first, second)
        function = _ARITHMETIC[kind]
        if second.constant:
            return first.mapped(lambda v: function(v, second.inside))
        if first.constant:
            return second.mapped(lambda v: function(first.inside, v))
    return None


def _times(a: float, b: float) -> float:
    return a * b if a and b else 0.0 if abs(a) != INFINITE and abs(b) != INFINITE else float("nan")


_COMPARISONS = {aten.le: (0, True), aten.lt: (-1, True), aten.ge: (0, False), aten.gt: (1, False)}
_AND = {aten.logical_and, aten.bitwise_and, aten.__and__}
_OR = {aten.logical_or, aten.bitwise_or, aten.__or__}
_ARITHMETIC = {
    aten.add: lambda a, b: a + b,
    aten.sub: lambda a, b: a - b,
    aten.rsub: lambda a, b: b - a,
    aten.mul: _times,
    **dict.fromkeys(_AND, lambda a, b: float(bool(a) and bool(b))),
    **dict.fromkeys(_OR, lambda a, b: float(bool(a) or bool(b))),
    aten.eq: lambda a, b: float(a == b),
    aten.ne: lambda a, b: float(a != b),
}


def _compared(kind, left: Position, right: Position) -> Pattern | None:
    """left <= right and the like: a band where one side counts rows and the other keys."""
    offset, at_most = _COMPARISONS[kind]
    steps = dict(left.steps)
    for dim, step in right.steps:
        steps[dim] = steps.get(dim, 0) - step
    steps = {dim: step for dim, step in steps.items() if step}
    if sorted(steps.values()) != [-1, 1]:
        return None
    plus, minus = (next(d for d, s in steps.items() if s == sign) for sign in (1, -1))
    bound = right.start - left.start + offset  # type: ignore[operator]
    # index[plus] - index[minus] <= bound (at_most) or >= bound; rows come before keys
    row, key = min(plus, minus), max(plus, minus)
    if (plus == key) == at_most:
        return Pattern(1.0, 0.0, row, key, high=bound if plus == key else -bound)
    return Pattern(1.0, 0.0, row, key, low=bound if plus == key else -bound)


def _shifted(kind, first, second) -> Position | None:
    sign = 1 if kind is aten.add else -1
    first, second = (
        o if isinstance(o, Position) else Position(o.inside) if o.constant else None for o in (first, second)
    )
    if first is None or second is None:
        return None
    steps = dict(first.steps)
    for dim, step in second.steps:
        steps[dim] = steps.get(dim, 0) + sign * step
    start = _whole(first.start) + sign * _whole(second.start)
    return Position(start, tuple(steps.items()))


def _whole(value):
    return int(value) if isinstance(value, float) and value == int(value) else value


def _both(first: Pattern, second: Pattern) -> Pattern | None:
    if (first.row, first.key) != (second.row, second.key):
        return None
    bands = [p if p.inside else _complement(p) for p in (first, second)]
    if any(b is None or not b.inside or b.outside for b in bands):
        return None
    a, b = bands
    return replace(a, low=_tighter(a.low, b.low, max), high=_tighter(a.high, b.high, min))  # type: ignore[union-attr]


def _tighter(a, b, choose):
    if abs(a) == INFINITE or abs(b) == INFINITE:
        return b if abs(a) == INFINITE else a
    return choose(a, b)


def _complement(p: Pattern) -> Pattern | None:
    """The same tensor with inside and outside exchanged; a half band has a half band as its complement."""
    if p.low == -INFINITE:
        return Pattern(p.outside, p.inside, p.row, p.key, low=p.high + 1)  # type: ignore[operator]
    if p.high == INFINITE:
        return Pattern(p.outside, p.inside, p.row, p.key, high=p.low - 1)  # type: ignore[operator]
    return None


def _chosen(condition: Pattern, yes: Pattern, no: Pattern) -> Pattern | None:
    if condition.constant:
        return yes if condition.inside else no
    if yes.constant and no.constant:
        pick = (yes.inside, no.inside)
        return replace(condition, inside=pick[not condition.inside], outside=pick[not condition.outside])
    return None


def _triangle(node: fx.Node, source) -> Pattern | None:
    if not isinstance(source, Pattern) or not source.constant:
        return None
    rank, diagonal = len(graph.shape(node)), node.args[1] if len(node.args) > 1 else 0
    if not isinstance(diagonal, int):
        return None
    bound = {"high": diagonal} if graph.packet(node) is aten.tril else {"low": diagonal}
    return Pattern(source.inside, 0.0, rank - 2, rank - 1, **bound)  # type: ignore[arg-type]


def _aligned(argument, node: fx.Node, known: dict):
    """An operand's value with its dimensions counted as the result's: broadcasting aligns the last ones."""
    found = _evaluate(argument, known)
    if found is None or not isinstance(argument, fx.Node):
        return found
    shift = len(graph.shape(node)) - len(graph.shape(argument))
    if isinstance(found, Position):
        return replace(found, steps=tuple((dim + shift, step) for dim, step in found.steps))
    return found.moved({dim: dim + shift for dim in range(len(graph.shape(argument)))})


def _viewed(node: fx.Node, source):
    """A value through a cast or a view that keeps its dimensions apart."""
    kind = graph.packet(node)
    if source is None or kind in CASTS:
        if isinstance(source, Pattern) and graph.value(node).dtype.is_floating_point is False:
            return source.mapped(lambda v: float(bool(v)) if graph.value(node).dtype.itemsize == 1 else v)
        return source
    before, after = graph.shape(node.args[0]), graph.shape(node)  # type: ignore[arg-type]
    if kind is aten.slice:
        named = graph.arguments(node)
        whole = named["start"] in (0, None) and named["step"] == 1
        return source if whole or (isinstance(source, Pattern) and source.constant) else None
    if kind in PERMUTES:
        order = permutation(node)
        places = {} if order is None else {old: new for new, old in enumerate(order)}
    elif kind in RESHAPES:
        places = _kept(before, after)
    else:
        places = {dim: dim + len(after) - len(before) for dim in range(len(before))}
        if kind in (aten.repeat, aten.repeat_interleave) and not (isinstance(source, Pattern) and source.constant):
            return None
    if isinstance(source, Pattern):
        return source.moved(places)
    if any(dim not in places for dim, _ in source.steps):
        return None
    return replace(source, steps=tuple((places[dim], step) for dim, step in source.steps))


def _kept(before, after) -> dict[int, int]:
    """Dimensions that a reshape only surrounds by dimensions of size one: old to new; empty for any other reshape."""
    old = [d for d, size in enumerate(before) if graph.expression(size) != 1]
    new = [d for d, size in enumerate(after) if graph.expression(size) != 1]
    if len(old) != len(new) or not all(graph.same_size(before[a], after[b]) for a, b in zip(old, new, strict=True)):
        return {}
    return dict(zip(old, new, strict=True))
