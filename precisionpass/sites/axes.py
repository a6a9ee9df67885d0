"""Axes: which part of a tensor's shape is the batch, the head, the query, the key, however it is viewed.

A layout is one entry per dimension: a tuple of axes (major first), empty where the dimension has size one or the
tensor does not depend on it. Views, permutations and expansions move axes about; a reshape may split an axis into
finer ones. Everything is decided from size expressions, never from today's sizes.
"""

import math
from collections.abc import Sequence

import sympy
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph

Layout = tuple[tuple[int, ...], ...]

RESHAPES = {
    aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze,
    aten.contiguous, aten.clone, aten.alias, aten.view_as, aten.reshape_as, aten.lift_fresh_copy, aten._reshape_alias,
}  # fmt: skip
PERMUTES = {
    aten.transpose, aten.permute, aten.t, aten.mT, aten.movedim, aten.swapaxes, aten.swapdims, aten.numpy_T,
    aten.mH, aten.adjoint,
}  # fmt: skip
EXPANDS = {aten.expand, aten.expand_as, aten.repeat, aten.repeat_interleave, aten.broadcast_to}
VIEWS = RESHAPES | PERMUTES | EXPANDS


class Axes:
    """The axes of one site: their sizes, and how they were split."""

    def __init__(self):
        self.sizes: list = []
        self.hints: list[int] = []  # today's sizes, for choices that change no result
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, size) -> tuple[int, ...]:
        """A fresh axis of this size as a dimension's entry; nothing for size one."""
        if graph.expression(size) == 1:
            return ()
        self.sizes.append(graph.expression(size))
        self.hints.append(graph.hint(size))
        return (len(self.sizes) - 1,)

    def finest(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The same axes after all splits."""
        flat: list[int] = []
        for axis in axes:
            flat.extend(self.finest(self._parts[axis]) if axis in self._parts else (axis,))
        return tuple(flat)

    def layout(self, layout: Layout) -> Layout:
        return tuple(self.finest(dim) for dim in layout)

    def size(self, axes: Sequence[int]):
        return sympy.prod([self.sizes[a] for a in self.finest(axes)]) if axes else 1

    def hint(self, axes: Sequence[int]) -> int:
        return math.prod(self.hints[a] for a in self.finest(axes))

    def _split(self, axis: int, major, minor, major_hint: int) -> tuple[int, int]:
        self.sizes += [major, minor]
        self.hints += [major_hint, self.hints[axis] // max(major_hint, 1)]
        parts = (len(self.sizes) - 2, len(self.sizes) - 1)
        self._parts[axis] = parts
        return parts

    def regroup(self, layout: Layout, shape) -> Layout | None:
        """The layout after a reshape to `shape`; None where axes and sizes do not line up."""
        left = [a for dim in self.layout(layout) for a in dim]
        result = []
        for whole in shape:
            size, today = graph.expression(whole), graph.hint(whole)
            taken: list[int] = []
            while size != 1:
                if not left:
                    return None
                have = self.sizes[left[0]]
                inside = _quotient(size, have)
                if inside is not None:
                    today //= max(self.hints[left[0]], 1)
                    taken.append(left.pop(0))
                    size = inside
                    continue
                outside = _quotient(have, size)
                if outside is None:
                    return None
                major, minor = self._split(left[0], size, outside, today)
                left[0] = minor
                taken.append(major)
                size = 1
            result.append(tuple(taken))
        return tuple(result) if not left else None

    # -- through one operation, from its input to its output and back --------------------------------------------

    def push(self, node: fx.Node, layout: Layout) -> Layout | None:
        """Layout of `node`'s output, given its input's."""
        kind = graph.packet(node)
        if kind in RESHAPES:
            return self.regroup(layout, graph.shape(node))
        if kind in PERMUTES:
            order = permutation(node)
            return None if order is None else tuple(layout[d] for d in order)
        if kind in (aten.expand, aten.expand_as, aten.broadcast_to):
            shape = graph.shape(node)
            layout = ((),) * (len(shape) - len(layout)) + tuple(layout)
            return tuple(dim if dim else self.new(size) for dim, size in zip(layout, shape, strict=True))
        return None

    def pull(self, node: fx.Node, layout: Layout) -> Layout | None:
        """Layout of `node`'s input, given its output's: axes that the input does not have are dropped."""
        kind, before = graph.packet(node), graph.shape(node.args[0])  # type: ignore[arg-type]
        if kind in RESHAPES:
            return self.regroup(layout, before)
        if kind in PERMUTES:
            order = permutation(node)
            if order is None:
                return None
            return tuple(layout[order.index(d)] for d in range(len(order)))
        if kind in (aten.expand, aten.expand_as, aten.broadcast_to):
            layout = self.layout(layout)[len(layout) - len(before) :]
            return tuple(() if graph.expression(s) == 1 else dim for dim, s in zip(layout, before, strict=True))
        if kind is aten.repeat_interleave:
            return self._unrepeat(node, layout, before, interleave=True)
        if kind is aten.repeat:
            return self._unrepeat(node, layout, before, interleave=False)
        return None

    def _unrepeat(self, node: fx.Node, layout: Layout, before, interleave: bool) -> Layout | None:
        """A repeated dimension is (old, copies) when interleaved and (copies, old) when tiled."""
        layout, after = self.layout(layout), graph.shape(node)
        layout = layout[len(after) - len(before) :]
        result = []
        for dim, old, new in zip(layout, before, after[len(after) - len(before) :], strict=True):
            if graph.same_size(old, new):
                result.append(dim)
                continue
            if graph.expression(old) == 1:
                result.append(())
                continue
            copies = _quotient(graph.expression(new), graph.expression(old))
            if copies is None:
                return None
            parts = self.regroup((dim,), (old, copies) if interleave else (copies, old))
            if parts is None:
                return None
            result.append(parts[0] if interleave else parts[1])
        return self.layout(tuple(result))


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """For a permuting call: the input dimension that each output dimension shows."""
    kind, rank = graph.packet(node), len(graph.shape(node.args[0]))  # type: ignore[arg-type]
    order = list(range(rank))
    if kind in (aten.transpose, aten.swapaxes, aten.swapdims):
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    elif kind is aten.permute:
        order = [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr]
    elif kind in (aten.t, aten.mT, aten.mH, aten.adjoint) and rank >= 2:
        order[-1], order[-2] = order[-2], order[-1]
    elif kind is aten.numpy_T:
        order.reverse()
    elif kind is aten.movedim:
        source, target = ([d] if isinstance(d, int) else list(d) for d in node.args[1:3])  # type: ignore[union-attr]
        moved = {int(t) % rank: int(s) % rank for s, t in zip(source, target, strict=True)}  # type: ignore[arg-type]
        rest = iter(d for d in range(rank) if d not in moved.values())
        order = [moved[d] if d in moved else next(rest) for d in range(rank)]
    elif kind not in (aten.t,):
        return None
    return tuple(order)


def _quotient(a, b):
    """a / b where b provably divides a, else None."""
    if isinstance(a, int | sympy.Integer) and isinstance(b, int | sympy.Integer):
        return int(a) // int(b) if int(b) and int(a) % int(b) == 0 else None
    if a == b:
        return 1
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    return ratio if ratio.as_numer_denom()[1] == 1 else None
