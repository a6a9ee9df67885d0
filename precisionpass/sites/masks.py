"""Masks that the graph builds from positions: which keys a row may see, as a band low <= j - i <= high.

arange, comparisons, tril, triu, and, or, not, where, masked_fill and arithmetic with numbers are evaluated symbolically
over the dimensions of the mask. A mask that comes from an input or a buffer stays a tensor: its content can change.
"""

from dataclasses import replace

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.axes import EXPANDS, PERMUTES, RESHAPES, VIEWS, permutation
from precisionpass.sites.contraction import contraction
from precisionpass.sites.patterns import COMPARISONS, Pattern, Position, both, chosen, compared, shifted, times, whole
from precisionpass.sites.scores import constant_of


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
        single = graph.expression(graph.shape(node)[0]) == 1
        return Position(start, () if single else ((0, step),)) if plain else None
    if kind in _FILLED:
        value = _FILLED[kind]
        if value is None:
            value = node.args[2 if kind is aten.new_full else 1]
        value = constant_of(value)
        return None if value is None else Pattern(value, value)
    if kind in CASTS or kind in RESHAPES or kind in PERMUTES or kind in EXPANDS or kind is aten.slice:
        return _viewed(node, _evaluate(node.args[0], known))
    if kind is aten.diff:
        return _differences(node, known)
    if kind in (aten.cumsum, aten.select, aten.index):
        source = _evaluate(node.args[0], known)
        if isinstance(source, Position):
            return _looked_up(node, source, known) if kind is aten.index else None
        unchanged = isinstance(source, Pattern) and source.constant and (kind is not aten.cumsum or source.inside == 0)
        return source if unchanged else None
    if kind in (aten.tril, aten.triu):
        return _triangle(node, _evaluate(node.args[0], known))
    operands = [_aligned(a, node, known) for a in node.args if isinstance(a, fx.Node | int | float)]
    if any(operand is None for operand in operands):
        return None
    return _combined(node, kind, operands)


def _combined(node: fx.Node, kind, operands):
    if kind in COMPARISONS and all(isinstance(o, Position) or o.constant for o in operands):
        return compared(kind, *(o if isinstance(o, Position) else Position(o.inside) for o in operands))
    if kind in (aten.add, aten.sub) and any(isinstance(o, Position) for o in operands):
        return shifted(kind, *operands) if constant_of(graph.arguments(node)["alpha"]) == 1 else None
    if any(isinstance(o, Position) for o in operands):
        return None
    if kind in (aten.logical_not, aten.bitwise_not):
        return operands[0].mapped(lambda v: float(not v))
    if kind in (aten.where, aten.masked_fill):
        condition, yes, no = operands if kind is aten.where else (operands[1], operands[2], operands[0])
        return chosen(condition, yes, no)
    if kind in _ARITHMETIC and len(operands) == 2:
        first, second = operands
        if kind in _AND and not (first.constant or second.constant):
            return both(first, second)
        function = _ARITHMETIC[kind]
        if second.constant:
            return first.mapped(lambda v: function(v, second.inside))
        if first.constant:
            return second.mapped(lambda v: function(first.inside, v))
    return None


def _differences(node: fx.Node, known: dict) -> Pattern | None:
    """Neighbours of an arange differ by its step, and so does what is put before it if it continues it."""
    named = graph.arguments(node)
    source, before = _evaluate(named["self"], known), named["prepend"]
    dim = int(named["dim"]) % len(graph.shape(node))
    if not isinstance(source, Position) or named["n"] != 1 or named["append"] is not None:
        return None
    step = dict(source.steps).get(dim, 0)
    if before is not None:
        first = _evaluate(before, known)
        one = graph.expression(graph.shape(before)[dim]) == 1
        continues = isinstance(first, Position) and one and whole(first.start) == whole(source.start) - step
        if not continues or _elsewhere(first, dim) != _elsewhere(source, dim):
            return None
    return Pattern(step, step)


def _looked_up(node: fx.Node, table: Position, known: dict) -> Position | None:
    """table[index, index, ...] of a table of positions, by positions."""
    indices = node.args[1]
    start, steps = whole(table.start), {}
    for dim, step in table.steps:
        found = _aligned(indices[dim], node, known) if dim < len(indices) and indices[dim] is not None else None
        if not isinstance(found, Position):
            return None
        start = start + step * whole(found.start)
        for d, inner in found.steps:
            steps[d] = steps.get(d, 0) + step * inner
    return Position(start, tuple(steps.items())) if all(i is not None for i in indices) else None


def _elsewhere(position: Position, dim: int) -> dict[int, int]:
    return {d: step for d, step in position.steps if d != dim and step}


_FILLED = {
    aten.ones: 1.0, aten.ones_like: 1.0, aten.new_ones: 1.0, aten.zeros: 0.0, aten.zeros_like: 0.0, aten.new_zeros: 0.0,
    aten.full: None, aten.full_like: None, aten.new_full: None,
}  # fmt: skip
_AND = {aten.logical_and, aten.bitwise_and, aten.__and__}
_OR = {aten.logical_or, aten.bitwise_or, aten.__or__}
_ARITHMETIC = {
    aten.add: lambda a, b: a + b,
    aten.sub: lambda a, b: a - b,
    aten.rsub: lambda a, b: b - a,
    aten.mul: times,
    **dict.fromkeys(_AND, lambda a, b: float(bool(a) and bool(b))),
    **dict.fromkeys(_OR, lambda a, b: float(bool(a) or bool(b))),
    aten.eq: lambda a, b: float(a == b),
    aten.ne: lambda a, b: float(a != b),
}


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


_LEARNED = {aten.linear, aten.gather, aten.embedding, aten.index, aten.index_select, aten.zeros, aten.zeros_like}
_MOVED = {
    aten.add, aten.add_, aten.sub, aten.mul, aten.mul_, aten.div, aten.neg, aten.cat, aten.slice, aten.select, aten.pad,
    aten.constant_pad_nd,
}  # fmt: skip


def may_exclude(node: fx.Node) -> bool:
    """Whether a tensor of the scores may be a mask, too: anything but products, look-ups, parameters and zeros."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        kind = graph.packet(node)
        if contraction(node) is not None or kind in _LEARNED or node.meta.get("parameter") or constant_of(node) == 0:
            continue
        if kind not in _MOVED and kind not in VIEWS and kind not in CASTS:
            return True
        fresh = [n for n in node.all_input_nodes if graph.is_tensor(n) and graph.value(n).dim() and n not in seen]
        seen.update(fresh)
        pending += fresh
    return False
