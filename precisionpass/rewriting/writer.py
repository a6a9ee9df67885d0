"""Writing into the captured graph: new calls before the place of an old one, and the old ones taken out."""

import operator
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch
from torch import fx

from precisionpass import graph
from precisionpass.shadow import Shadow

# The results of a site that others read: the captured node's name -> the node that took its place.
Placed = Mapping[str, fx.Node]


class CannotPlace(Exception):
    """A site's new call has no place in the graph. reason: of the decision to refuse it."""

    reason = "cannot_be_placed"


class ShiftTooLarge(CannotPlace):
    """A row_max_shift that takes exp below the smallest number of the site's dtype."""

    reason = "shift_too_large"


class ActionRefuses(CannotPlace):
    """An action of the user's says that it does not compute this site."""

    reason = "action_refuses"


class Writer:
    """New nodes for one site, all before captured node `before`."""

    def __init__(self, shadow: Shadow, output: fx.Node):
        self.shadow = shadow
        self.before = shadow.source.get(output) or shadow.owner[output]
        self.meta = {
            key: self.before.meta[key] for key in ("nn_module_stack", "stack_trace") if key in self.before.meta
        }
        self.known: dict[fx.Node, fx.Node] = {}  # shadow node -> new captured node
        self.made: dict[fx.Node, None] = {}

    def call(self, function: Callable, *args, **kwargs) -> fx.Node:
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_function(function, args, kwargs)
        return self._note(node)

    def method(self, name: str, *args) -> fx.Node:
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_method(name, args)
        return self._note(node)

    def cast(self, node: fx.Node, have: torch.dtype, want: torch.dtype) -> fx.Node:
        return node if have == want else self.method("to", node, want)

    def _note(self, node: fx.Node) -> fx.Node:
        node.meta.update(self.meta)
        self.made[node] = None
        return node

    def captured(self, node: fx.Node) -> fx.Node:
        """The captured node that computes a shadow node; for one inside a composite call, a copy of that call."""
        if node in self.known:
            return self.known[node]
        source = self.shadow.source.get(node)
        if source is not None:
            if not source < self.before:
                raise CannotPlace(f"{source.name} is computed after the place of the new call")
            return source
        if written := graph.mutated(node):
            return self.captured(written[0])  # `m[i] = x` gives nothing: m itself has been written to by now
        return self.copy(node)

    def copy(self, node: fx.Node) -> fx.Node:
        """The shadow node's own call, written into the captured graph."""
        if node.op != "call_function" or graph.is_mutable(node):
            raise CannotPlace(f"{node.name} is computed inside another call")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.captured)
        self.known[node] = self.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        return self.known[node]

    def laid_out_as(self, like: fx.Node, node: fx.Node, order: Sequence[int] = ()) -> fx.Node:
        """`node` in the order of memory that shadow node `like` has, so that views of it stay possible.

        order: the dimensions of `node` from the one of the largest stride on; () where it is contiguous.
        """
        want = order_in_memory(like)
        plain = list(range(len(want)))
        if want == list(order or plain):
            return node
        if want == plain:
            return self.method("contiguous", node)
        turned = self.method("contiguous", self.method("permute", node, want))
        return self.method("permute", turned, [want.index(dim) for dim in plain])

    def number(self, expression: sympy.Expr, symbols: Mapping[str, fx.Node]) -> object:
        """A factor as a plain float, or as calls on the graph's own symbolic numbers."""
        if expression.is_Number:
            return float(expression)
        if expression.is_Symbol:
            return self.captured(symbols[expression.name])  # type: ignore[attr-defined]
        if expression.is_Mul:
            result, *parts = [self.number(factor, symbols) for factor in expression.args]
            for part in parts:
                result = self.call(operator.mul, result, part)
            return result
        if expression.is_Pow and expression.exp == -1:  # type: ignore[attr-defined]
            return self.call(operator.truediv, 1.0, self.number(expression.base, symbols))  # type: ignore[attr-defined]
        raise CannotPlace(f"the scale {expression} is not a product of numbers")

    def replace(self, interior: frozenset[fx.Node], results: Mapping[fx.Node, fx.Node]) -> Placed:
        """Let `results` (shadow node -> new captured node) take over, then erase the captured calls of the site.

        A result inside a composite call (multi_head_attention_forward) is carried on to that call's own results by
        copies of the calls that follow it in there.
        """
        self.known.update(results)
        sources = [self.shadow.source.get(node) or self.shadow.owner.get(node) for node in interior]
        visible = self._visible(results)
        for user in (user for old in visible for user in old.users):  # all of them before anything is changed
            if user not in self.made and user < self.before and self.shadow.image.get(user) not in interior:
                raise CannotPlace(f"{user.name} reads a result before the place of the new call")
        for old, new in visible.items():
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self.made)
            image = self.shadow.image.get(old)
            if isinstance(image, fx.Node):
                self.shadow.source[image] = new  # a later site that reads this result reads the new one
        taken = [user for old in visible if _takes_a_part(old) for user in old.args[0].users]  # type: ignore[union-attr]
        for node in sorted({s for s in (*sources, *taken) if s is not None}, reverse=True):
            if not node.users and node not in self.made and node.op not in ("placeholder", "output"):
                node.graph.erase_node(node)
        return {old.name: new for old, new in visible.items()}

    def undo(self) -> None:
        """Take the new nodes out again, where nothing reads them yet."""
        for node in reversed(self.made):
            node.graph.erase_node(node)

    def _visible(self, results: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Captured nodes to be replaced, with what replaces them."""
        visible = {}
        for old, new in results.items():
            source = self.shadow.source.get(old)
            if source is not None:
                visible[source] = new
                continue
            composite = self.shadow.owner[old]
            for captured in (composite, *composite.users):
                image = self.shadow.image.get(captured)
                if isinstance(image, fx.Node) and image not in results and self.shadow.owner.get(image) is composite:
                    visible[captured] = self.known.get(image) or self.copy(image)
        return visible


def _takes_a_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def order_in_memory(node: fx.Node) -> list[int]:
    """The dimensions from the one of the largest stride on; for today's sizes."""
    strides = [graph.hint(stride) for stride in graph.value(node).stride()]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
