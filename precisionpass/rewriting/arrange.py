"""Bringing a tensor from one layout of a site's axes into another, with views wherever views can do it."""

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.rewriting.writer import CannotPlace, Writer
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.axes import VIEWS, Axes, Layout
from precisionpass.sites.site import Operand


class Arranger:
    """Layout changes for one site. `sizes` tells where a symbolic size can be read: (captured node, its layout)."""

    def __init__(self, writer: Writer, axes: Axes, sizes: list[tuple[fx.Node, Layout]]):
        self.writer, self.axes = writer, axes
        self.sizes = [(node, axes.layout(layout)) for node, layout in sizes]

    def operand(self, operand: Operand, target: Layout, dtype: torch.dtype) -> fx.Node:
        """q, k or v in the op's layout and format: from the nearest place that has it as it is, else the furthest."""
        target = self.axes.layout(target)
        axes = {a for dim in target for a in dim}
        captured = self.writer.shadow.source
        usable = [
            (node, layout)
            for node, layout in ((n, self.axes.layout(lay)) for n, lay in operand.places)
            if {a for dim in layout for a in dim} <= axes
        ]
        for node, layout in usable:
            if layout == target and node in captured:
                return self.writer.cast(self.writer.captured(node), graph.dtype(node), dtype)
        reachable = [(node, layout) for node, layout in usable if node in captured]
        node, layout = (reachable or usable)[-1]
        brought = self.bring(self.writer.captured(node), layout, target, expand=True)
        return self.writer.cast(brought, graph.dtype(node), dtype)

    def bring(self, node: fx.Node, layout: Layout, target: Layout, expand: bool = False) -> fx.Node:
        """`node` of `layout` with one dimension for each group of `target`.

        A group that the tensor does not depend on at all stays of size one, unless `expand`; one that it depends on
        in part is expanded to the whole group.
        """
        layout, target = self.axes.layout(layout), self.axes.layout(target)
        for dim in reversed(range(len(layout))):
            if len(layout[dim]) > 1:
                node = self.writer.method("unflatten", node, dim, self._sizes(layout[dim]))
            elif not layout[dim]:
                node = self.writer.method("squeeze", node, dim)
        present = [a for dim in layout for a in dim]
        if any(a not in [b for dim in target for b in dim] for a in present):
            raise CannotPlace("a tensor depends on an axis that the new call does not have")
        order = [present.index(a) for group in target for a in group if a in present]
        if order != sorted(order):
            node = self.writer.method("permute", node, order)
        whole: list[int] = []
        position = 0
        missing = False
        for group in target:
            depends = any(a in present for a in group)
            for a in group:
                if a in present:
                    whole.append(-1)
                elif depends or expand:
                    node = self.writer.method("unsqueeze", node, position)
                    whole.append(self._size(a))
                    missing = True
                else:
                    continue
                position += 1
        if missing:
            node = self.writer.method("expand", node, whole)
        position = 0
        for group in target:
            count = len(group) if expand or any(a in present for a in group) else 0
            if count == 0:
                node = self.writer.method("unsqueeze", node, position)
            elif count > 1:
                node = self.writer.method("flatten", node, position, position + count - 1)
            position += 1
        return node

    def back(self, node: fx.Node, groups: Layout, target: Layout) -> fx.Node:
        """The op's output, one dimension for each of `groups`, in the layout that the model goes on with."""
        groups, target = self.axes.layout(groups), self.axes.layout(target)
        if groups == target:
            return node
        return self.bring(node, groups, target)

    def _sizes(self, dim: tuple[int, ...]) -> list:
        sizes = [self.axes.size((a,)) for a in dim]
        symbolic = [n for n, size in enumerate(sizes) if not isinstance(size, int) and not size.is_number]
        if len(symbolic) == 1:
            return [-1 if n in symbolic else int(size) for n, size in enumerate(sizes)]
        return [self._size(a) for a in dim]

    def _size(self, axis: int):
        size = self.axes.size((axis,))
        if isinstance(size, int) or size.is_number:
            return int(size)
        for node, layout in self.sizes:
            for dim, group in enumerate(layout):
                if group == (axis,):
                    return self.writer.call(torch.ops.aten.sym_size.int, node, dim)
        raise CannotPlace("a symbolic size cannot be read off any tensor of the site")


class _OnMeta:
    """Takes the writer's place to follow the strides of what it would write, on meta tensors of today's sizes."""

    def method(self, name: str, tensor: torch.Tensor, *args) -> torch.Tensor:
        return getattr(tensor, name)(*args)


class _StridesOnly(Arranger):
    def _size(self, axis: int) -> int:
        return self.axes.hint((axis,))


def strides_matter(output: fx.Node, axes: Axes, groups: Layout, target: Layout) -> bool:
    """Whether anything that reads `output` could tell the op's memory layout from the model's own.

    A view may fail on it or see other elements, a change in place or the caller may depend on it. Only what is known
    not to is let through. groups: the op's output dimensions [B, H, S, D], whose memory is [B, S, H, D]. target: the
    model's own layout.
    """
    b, h, s, d = (axes.hint(group) for group in groups)
    memory = torch.empty((b, s, h, d), device="meta").transpose(1, 2)
    ours = _StridesOnly(_OnMeta(), axes, []).back(memory, groups, target)  # type: ignore[arg-type]
    pending = [(output, ours)]
    while pending:
        node, value = pending.pop()
        if value.stride() == tuple(map(graph.hint, graph.value(node).stride())):
            if len(output.users) > 1 and any(map(graph.is_mutable, node.users)):
                return True  # the model's own may have been a copy by now, ours a view of the output
            continue
        if "used" in node.meta:
            return True
        for user in node.users:
            kind = graph.packet(user)
            if kind in _INDIFFERENT or kind is aten.sym_size:
                continue
            if graph.is_mutable(user) or not graph.is_tensor(user):
                return True
            if _keeps_strides(user, kind):
                pending.append((user, value))
            elif kind in VIEWS and user.args[0] is node:
                try:
                    pending.append((user, user.target(value, *_concrete(user.args[1:]))))
                except RuntimeError:
                    return True
            else:
                return True
    return False


# What gives the same result in the same memory layout however its input lies in memory.
_INDIFFERENT = {
    aten.matmul, aten.bmm, aten.mm, aten.addmm, aten.linear, aten.einsum, aten.contiguous, aten.layer_norm,
    aten.sum, aten.mean,
}  # fmt: skip


def _keeps_strides(user: fx.Node, kind) -> bool:
    """Element by element on a tensor of the result's own shape: the result lies in memory as that tensor does."""
    if kind in CASTS or kind is aten.dropout:
        return True
    if torch.Tag.pointwise not in getattr(user.target, "tags", ()):
        return False
    return all(graph.shape(n) == graph.shape(user) for n in user.all_input_nodes if graph.is_tensor(n))


def _concrete(argument):
    """Symbolic numbers as today's values, in lists and tuples as well."""
    if isinstance(argument, list | tuple):
        return [_concrete(a) for a in argument]
    return graph.hint(graph.value(argument)) if isinstance(argument, fx.Node) else argument
