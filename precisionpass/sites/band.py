"""Masks of an attention that are a relation between positions: low <= j - i <= high, instead of a tensor."""

from dataclasses import dataclass, replace

import sympy

from precisionpass.score import expression
from precisionpass.score.expression import INFINITY, RAW, Where
from precisionpass.sites.masks import may_exclude, pattern_of
from precisionpass.sites.patterns import INFINITE, Pattern
from precisionpass.sites.site import Attention, Band

# A masked score this low weighs exactly nothing beside any allowed one, so it may stand for -inf, as long as the row
# has an allowed key. (-1e4 does not: scores of models with large norms reach it.)
AS_GOOD_AS_INFINITE = -1e9


def with_band(operation: Attention) -> Attention:
    """The attention with every mask that is such a relation taken out of its score expression and into its band."""
    for position in range(len(operation.reads)):
        operation = _without(operation, position)
    return operation


@dataclass(frozen=True)
class _Mask:
    """A read of the score that masks: where it allows, what it fills elsewhere, and `part`, to become `kept`."""

    allowed: Pattern
    fill: float
    part: sympy.Basic
    kept: sympy.Basic


def _without(operation: Attention, position: int) -> Attention:
    """The attention with this read of its score as a part of the band, or as it is."""
    found = _mask(operation, position)
    if found is None:
        return operation
    covered = _under_a_finite_fill(operation.score, found.part)
    others = [other for other in expression.reads(operation.score) if covered or other != position]
    if (covered or found.fill != -INFINITE) and any(_may_leave_no_key(operation, other) for other in others):
        return operation  # what a row without a key comes to is a matter of the fills
    band = _band(operation, found.allowed, found.fill)
    if band is None:
        return operation
    return replace(operation, score=operation.score.xreplace({found.part: found.kept}), band=band)


def _mask(operation: Attention, position: int) -> _Mask | None:
    """What a read masks, where it holds a pattern and is a mask and nothing else."""
    node, layout = operation.reads[position]
    pattern, score, axes = pattern_of(node), operation.score, operation.axes
    if pattern is None or pattern.constant:
        return None
    layout = axes.layout(layout)
    if layout[pattern.row] != axes.finest(operation.rows) or layout[pattern.key] != axes.finest(operation.keys):
        return None
    symbol = expression.read(position)
    masking = [e for e in score.atoms(Where) if e.args[0] == symbol]
    outer = dict(expression.outer_masks(score))
    if len(masking) == 1 and masking[0] in outer:
        _, yes, no = masking[0].args
        kept, filled, allows = (yes, no, True) if yes.has(RAW) else (no, yes, False)
        fill = _number(filled)
        if fill is None or kept.has(symbol):
            return None
        return _Mask(pattern.mapped(lambda v: bool(v) == allows), fill * float(outer[masking[0]]), masking[0], kept)
    if symbol in _added(score) and not masking:
        allowed = pattern.mapped(lambda v: v == 0)
        fill = pattern.outside if allowed.inside else pattern.inside
        return _Mask(allowed, fill, symbol, sympy.Integer(0))
    return None


def _under_a_finite_fill(score: sympy.Expr, part: sympy.Basic) -> bool:
    """Whether a mask further out puts finite numbers where this one may have put an infinity."""
    return any(mask != part and mask.has(part) and -INFINITY not in mask.args for mask in score.atoms(Where))


def _may_leave_no_key(operation: Attention, position: int) -> bool:
    """Whether a read may exclude the key of a row's own position, or the last key from a row that has none there."""
    if not may_exclude(operation.reads[position][0]):
        return False
    found = _mask(operation, position)
    bounds = None if found is None else _bounds(found.allowed)
    return bounds is None or (bounds.low or 0) > 0 or not _every_row_lives(bounds, operation)


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
