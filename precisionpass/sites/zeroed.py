"""Probabilities that are set to zero after the softmax where a mask has excluded their keys before it.

In a row with an allowed key they are zero already. In a row without one the output becomes zero: what a softmax that is
safe for dead rows gives.
"""

from dataclasses import dataclass

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.score import expression
from precisionpass.score.expression import INFINITY, Where
from precisionpass.sites.anchors import uncast
from precisionpass.sites.axes import Layout
from precisionpass.sites.band import AS_GOOD_AS_INFINITE
from precisionpass.sites.masks import may_exclude, pattern_of
from precisionpass.sites.scores import Scores, constant_of
from precisionpass.sites.site import Refused

_FILL = {aten.masked_fill, aten.masked_fill_}


@dataclass(frozen=True)
class Zeroing:
    """Probabilities are zero wherever `condition` is `where`; `layout`: of the probabilities."""

    condition: fx.Node
    where: bool
    layout: Layout


def zeroing(user: fx.Node, node: fx.Node, layout: Layout) -> Zeroing | None:
    """masked_fill(p, condition, 0), where(condition, p, 0), where(condition, 0, p), p * condition."""
    if graph.packet(user) in _FILL and user.args[0] is node and constant_of(user.args[2]) == 0:
        return Zeroing(user.args[1], True, layout)  # type: ignore[arg-type]
    if graph.packet(user) is aten.where:
        condition, yes, no = user.args
        if yes is node and constant_of(no) == 0:
            return Zeroing(condition, False, layout)  # type: ignore[arg-type]
        if no is node and constant_of(yes) == 0:
            return Zeroing(condition, True, layout)  # type: ignore[arg-type]
    if graph.packet(user) is aten.mul and all(map(graph.is_tensor, user.args[:2])):
        mask = user.args[1] if user.args[0] is node else user.args[0]
        each = len(graph.shape(mask)) > 0 and graph.expression(graph.shape(mask)[-1]) != 1  # type: ignore[arg-type]
        if each and (found := boolean(mask)) is not None:  # type: ignore[arg-type]
            return Zeroing(found, False, layout)
    return None


def exclude(scores: Scores, zeroed: Zeroing) -> None:
    """Fill with -inf where the scores have the same mask. Raises Refused where they have none or another as well."""
    layout = Scores(scores.axes, zeroed.layout).aligned(zeroed.condition)
    condition, zero_where = _without_not(zeroed.condition, zeroed.where)
    for found, factor in expression.outer_masks(scores.expression):
        node, its_layout = scores.reads[expression.reads(found.args[0])[0]]
        yes, no = found.args[1:]
        node, first = _without_not(node, zero_where)  # first: whether `yes` is what stands where the weights are zero
        fill = yes if first else no
        low = fill == -INFINITY or (fill.is_Number and fill * factor <= AS_GOOD_AS_INFINITE)
        if low and _same_value(node, condition) and scores.axes.layout(its_layout) == layout:
            others = [p for p in expression.reads(scores.expression) if expression.read(p) != found.args[0]]
            if fill == -INFINITY or not any(may_exclude(scores.reads[p][0]) for p in others):
                sides = (-INFINITY, no) if first else (yes, -INFINITY)
                scores.expression = scores.expression.xreplace({found: Where(found.args[0], *sides)})
                return
    raise Refused("mixed_after_softmax", "probabilities set to zero that the scores do not exclude")


def _without_not(condition, where: bool) -> tuple[object, bool]:
    """The same places by a condition that is not the negation of another."""
    while True:
        kind = graph.packet(condition)
        if kind not in (aten.logical_not, aten.bitwise_not) and not (
            kind is aten.eq and constant_of(condition.args[1]) == 0
        ):
            return condition, where
        condition, where = condition.args[0], not where


def boolean(mask: fx.Node) -> fx.Node | None:
    """A mask of 0 and 1, or what it was before it became numbers; None for weights."""
    bare = uncast(mask)
    if graph.dtype(bare) == torch.bool:
        return bare  # type: ignore[return-value]
    pattern = pattern_of(mask)
    return mask if pattern is not None and {pattern.inside, pattern.outside} == {0.0, 1.0} else None


def _same_value(one, other) -> bool:
    """The same node, or the same calls on the same nodes, none of which writes."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return one == other if not isinstance(one, list | tuple) else _all_same(one, other)
    if one is other:
        return True
    pure = one.op == other.op == "call_function" and one.target is other.target and not graph.is_mutable(one)
    return pure and one.kwargs == other.kwargs and _all_same(one.args, other.args)


def _all_same(ones, others) -> bool:
    return isinstance(others, list | tuple) and len(ones) == len(others) and all(map(_same_value, ones, others))
