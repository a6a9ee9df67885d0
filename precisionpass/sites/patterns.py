"""What a mask can be told to hold: positions, and patterns of two values by a band low <= key - row <= high."""

from dataclasses import dataclass, replace

from torch.ops import aten  # pyright: ignore[reportMissingImports]

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


COMPARISONS = {aten.le: (0, True), aten.lt: (-1, True), aten.ge: (0, False), aten.gt: (1, False)}


def compared(kind, left: Position, right: Position) -> Pattern | None:
    """left <= right and the like: a band where one side counts rows and the other keys."""
    offset, at_most = COMPARISONS[kind]
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


def shifted(kind, first, second) -> Position | None:
    sign = 1 if kind is aten.add else -1
    first, second = (
        o if isinstance(o, Position) else Position(o.inside) if o.constant else None for o in (first, second)
    )
    if first is None or second is None:
        return None
    steps = dict(first.steps)
    for dim, step in second.steps:
        steps[dim] = steps.get(dim, 0) + sign * step
    start = whole(first.start) + sign * whole(second.start)
    return Position(start, tuple(steps.items()))


def whole(value):
    """A number without its fraction where it has none."""
    return int(value) if isinstance(value, float) and value == int(value) else value


def both(first: Pattern, second: Pattern) -> Pattern | None:
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


def chosen(condition: Pattern, yes: Pattern, no: Pattern) -> Pattern | None:
    if condition.constant:
        return yes if condition.inside else no
    if yes.constant and no.constant:
        pick = (yes.inside, no.inside)
        return replace(condition, inside=pick[not condition.inside], outside=pick[not condition.outside])
    return None


def times(a: float, b: float) -> float:
    return a * b if a and b else 0.0 if abs(a) != INFINITE and abs(b) != INFINITE else float("nan")
