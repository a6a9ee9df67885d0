"""Products of two tensors, in one form: which label each dimension of the operands and of the result carries."""

from dataclasses import dataclass, replace

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph

Labels = tuple[str, ...]
ONE = "1"  # the label of a dimension of size one that no operand has


@dataclass(frozen=True)
class Contraction:
    """out = alpha * sum over the labels that `out` lacks of left * right, plus beta * addend.

    A label on a dimension of size one means broadcasting, as in torch.
    """

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_labels: Labels
    right_labels: Labels
    labels: Labels
    alpha: object = 1
    addend: fx.Node | None = None
    beta: object = 1
    inside: tuple[fx.Node, ...] = ()  # further nodes that are a part of the product

    @property
    def summed(self) -> tuple[str, ...]:
        return tuple(label for label in self.left_labels if label in self.right_labels and label not in self.labels)

    def swapped(self) -> "Contraction":
        sides = {
            "left": self.right,
            "right": self.left,
            "left_labels": self.right_labels,
            "right_labels": self.left_labels,
        }
        return replace(self, **sides)


def contraction(node: fx.Node) -> Contraction | None:
    """The product that `node` computes, or None if it is not one of two tensors."""
    kind = graph.packet(node)
    if kind is aten.matmul:
        return _matmul(node, *node.args[:2])
    if kind in (aten.bmm, aten.mm):
        return _matmul(node, *node.args[:2])
    if kind in (aten.baddbmm, aten.addmm):
        named = graph.arguments(node)
        product = _matmul(node, *node.args[1:3])
        if named["beta"] == 0:
            return replace(product, alpha=named["alpha"])
        return replace(product, alpha=named["alpha"], addend=named["self"], beta=named["beta"])
    if kind is aten.einsum:
        return _einsum(node)
    if kind is aten.sum:
        return _multiplied_and_summed(node)
    if kind in (aten.tensordot, aten.inner):
        return _tensordot(node)
    if kind is aten.linear and graph.arguments(node)["bias"] is None:
        left, weight = node.args[:2]
        rows = tuple(f"b{n}" for n in range(len(graph.shape(left)) - 1))  # type: ignore[arg-type]
        return Contraction(node, left, weight, (*rows, "c"), ("n", "c"), (*rows, "n"))  # type: ignore[arg-type]
    return None


def _multiplied_and_summed(node: fx.Node) -> Contraction | None:
    """(left * right).sum(dim), both with all dimensions of the result before the sum."""
    product, named = node.args[0], graph.arguments(node)
    dims = named.get("dim")
    if graph.packet(product) is not aten.mul or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    left, right = product.args[:2]  # type: ignore[union-attr]
    rank = len(graph.shape(product))  # type: ignore[arg-type]
    if not all(graph.is_tensor(side) and len(graph.shape(side)) == rank for side in (left, right)) or rank < 3:  # type: ignore[arg-type]
        return None
    labels = tuple(f"d{n}" for n in range(rank))
    summed = int(dims[0]) % rank
    kept = (ONE,) if named["keepdim"] else ()
    out = (*labels[:summed], *kept, *labels[summed + 1 :])
    return Contraction(node, left, right, labels, labels, out, inside=(product,))  # type: ignore[arg-type]


def _tensordot(node: fx.Node) -> Contraction:
    """Sums over the last dimensions of one and the first of the other, or over those that are named."""
    left, right = node.args[:2]
    a, b = len(graph.shape(left)), len(graph.shape(right))  # type: ignore[arg-type]
    over = node.args[2:4] if graph.packet(node) is aten.tensordot else ([a - 1], [b - 1])
    pairs = {int(n) % b: int(m) % a for m, n in zip(*over, strict=True)}  # type: ignore[arg-type]
    left_labels = tuple(f"l{n}" for n in range(a))
    right_labels = tuple(f"l{pairs[n]}" if n in pairs else f"r{n}" for n in range(b))
    out = (
        *(f"l{n}" for n in range(a) if n not in pairs.values()),
        *(label for label in right_labels if label[0] == "r"),
    )
    return Contraction(node, left, right, left_labels, right_labels, out)  # type: ignore[arg-type]


def _matmul(node: fx.Node, left, right) -> Contraction:
    a, b = len(graph.shape(left)), len(graph.shape(right))
    batch = tuple(f"b{n}" for n in range(max(a, b, 2) - 2))
    rows = ("m",) if a > 1 else ()
    columns = ("n",) if b > 1 else ()
    left_batch = batch[len(batch) - (a - 2) :] if a > 2 else ()
    right_batch = batch[len(batch) - (b - 2) :] if b > 2 else ()
    return Contraction(
        node, left, right, (*left_batch, *rows, "c"), (*right_batch, "c", *columns), (*batch, *rows, *columns)
    )


def _einsum(node: fx.Node) -> Contraction | None:
    equation, operands = node.args[:2]
    if len(operands) != 2:  # type: ignore[arg-type]
        return None
    equation = str(equation).replace(" ", "")
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    ranks = [len(graph.shape(operand)) for operand in operands]  # type: ignore[union-attr]
    dots = [
        rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)
    ]
    if not _has_arrow(equation):
        letters = [c for term in terms for c in term if c.isalpha()]
        output = ("..." if any(dots) else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    left, right = (_letters(term, count, max(dots)) for term, count in zip(terms, dots, strict=True))
    out = _letters(output, max(dots), max(dots))
    if any(len(set(labels)) != len(labels) for labels in (left, right, out)):
        return None
    only = (set(left) ^ set(right)) - set(out)  # a label summed within one operand alone
    return None if only else Contraction(node, operands[0], operands[1], left, right, out)  # type: ignore[index]


def _has_arrow(equation: str) -> bool:
    return "->" in equation


def _letters(term: str, dots: int, most: int) -> Labels:
    head, found, tail = term.partition("...")
    middle = tuple(f"...{n}" for n in range(most - dots, most)) if found else ()
    return (*head, *middle, *tail)
