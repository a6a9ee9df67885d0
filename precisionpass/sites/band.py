"""Masks of an attention that are a relation between positions: low <= j - i <= high, instead of a tensor."""

from dataclasses import replace

import sympy

from precisionpass.score import expression
from precisionpass.score.expression import INFINITY, RAW, Where
from precisionpass.sites.masks import pattern_of
from precisionpass.sites.patterns import INFINITE, Pattern
from precisionpass.sites.site import Attention, Band

# A masked score this low weighs exactly nothing beside any allowed one, so it may stand for -inf, as long as the row
# has an allowed key. (-1e4 does not: scores of models with large norms reach it.)
AS_GOOD_AS_INFINITE = -1e9


def with_band(operation: Attention) -> Attention:
    """The attention with every mask that is such a relation taken out of its score expression and into its band."""
    for position, (node, layout) in enumerate(operation.reads):
        pattern = pattern_of(node)
        if pattern is None or pattern.constant:
            continue
        layout = operation.axes.layout(layout)
        axes = operation.axes
        if layout[pattern.row] != axes.finest(operation.rows) or layout[pattern.key] != axes.finest(operation.keys):
            continue
        operation = _without(operation, expression.read(position), pattern)
    return operation


def _without(operation: Attention, symbol: sympy.Symbol, pattern: Pattern) -> Attention:
    score = operation.score
    masking = [e for e in score.atoms(Where) if e.args[0] == symbol]
    if len(masking) == 1:
        _, yes, no = masking[0].args
        kept, filled, allows = (yes, no, True) if yes.has(RAW) else (no, yes, False)
        fill = _number(filled)
        if fill is None or kept.has(symbol):
            return operation
        allowed = pattern.mapped(lambda v: bool(v) == allows)
        old, new = masking[0], kept
    elif symbol in _added(score) and not masking:
        allowed = pattern.mapped(lambda v: v == 0)
        fill = pattern.outside if allowed.inside else pattern.inside
        old, new = symbol, sympy.Integer(0)
    else:
        return operation
    band = _band(operation, allowed, fill)
    return operation if band is None else replace(operation, score=score.xreplace({old: new}), band=band)


def _added(score: sympy.Expr) -> list[sympy.Symbol]:
    """Tensor reads that are added to the scores at the outermost level."""
    return [expression.read(position) for position in expression.take_apart(score).biases]


def _band(operation: Attention, allowed: Pattern, fill: float) -> Band | None:
    """The site's band narrowed by a mask, where the op can express it and the fill stands for -inf."""
    bounds = _bounds(allowed)
    if bounds is None:
        return None
    old = operation.band
    if (
        old.high is not None
        and bounds.high is not None
        and not (isinstance(old.high, int) and isinstance(bounds.high, int))
    ):
        return None
    band = Band(_narrower(max, old.low, bounds.low), _narrower(min, old.high, bounds.high))
    if as_arguments(band, operation) is None:
        return None
    stands_for_infinity = fill == -INFINITE or (fill <= AS_GOOD_AS_INFINITE and _every_row_lives(band, operation))
    return band if stands_for_infinity else None


def _bounds(allowed: Pattern) -> Band | None:
    """Where a mask allows: inside its band, or outside of a half band, which is a half band as well."""
    if bool(allowed.inside) == bool(allowed.outside):
        return None
    low = None if allowed.low == -INFINITE else int(allowed.low)  # type: ignore[call-overload]
    high = None if allowed.high == INFINITE else int(allowed.high)  # type: ignore[call-overload]
    if allowed.inside:
        return Band(low, high)
    if low is not None and high is not None:
        return None
    return Band(low=high + 1) if high is not None else Band(high=low - 1)  # type: ignore[operator]


def _narrower(choose, first, second):
    return second if first is None else first if second is None else choose(first, second)


def _number(e: sympy.Expr) -> float | None:
    if e == -INFINITY:
        return -INFINITE
    return float(e) if e.is_Number else None


def _every_row_lives(band: Band, operation: Attention) -> bool:
    """Whether every row provably has an allowed key."""
    rows, keys = operation.axes.size(operation.rows), operation.axes.size(operation.keys)
    if band.high is not None and not (isinstance(band.high, int) and band.high >= 0):
        return False
    if band.low is None:
        return True
    difference = sympy.sympify(keys - rows)
    return bool(difference.is_number and band.low <= int(difference))


def as_arguments(band: Band, operation: Attention) -> dict[str, object] | None:
    """The band in the op's own terms (causal, window_left, window_right); None where it has none for it."""
    difference = sympy.sympify(operation.axes.size(operation.keys) - operation.axes.size(operation.rows))
    result: dict[str, object] = {}
    offset: int | sympy.Expr = 0
    if band.high is not None:
        if band.high == 0:
            result["causal"] = "top_left"
        elif difference.is_number and band.high == int(difference):
            result["causal"], offset = "bottom_right", int(difference)
        elif isinstance(band.high, int) and band.high > 0:
            result["window_right"] = band.high
        else:
            return None
    if band.low is not None:
        if offset - band.low < 0:
            return None
        result["window_left"] = offset - band.low
    return result
