"""A score expression as Triton statements: the same meaning as ``evaluate``, on tiles of FP32 in registers.

Only what is written here ever stands in the text: names of the grammar, numbers by ``repr``, calls of the table below.
"""

from __future__ import annotations

from collections.abc import Sequence

from precisionpass.score.grammar import Node

NAN_STAYS = "propagate_nan=tl.PropagateNan.ALL"
CALLS = {
    "tanh": "tanh({})",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "abs": "tl.abs({})",
    "negative": "-{}",
    "min": f"tl.minimum({{}}, {{}}, {NAN_STAYS})",
    "max": f"tl.maximum({{}}, {{}}, {NAN_STAYS})",
    "clamp": f"tl.minimum(tl.maximum({{}}, {{}}, {NAN_STAYS}), {{}}, {NAN_STAYS})",
}
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
CONNECTIVES = {"and": "{} & {}", "or": "{} | {}", "not": "~{}"}


def triton_statements(expressions: Sequence[Node], booleans: frozenset[str]) -> tuple[list[str], list[str]]:
    """(statements, the name of each expression's value), FP32 tiles or scalars that broadcast with one another.

    The statements read ``s``, ``b``, ``h``, ``i``, ``j`` and ``t0``, ... as FP32, those in ``booleans`` as int1, and
    call ``tl`` and ``tanh``. Equal parts of all expressions are computed once.
    """
    writer = _Writer(booleans)
    names = [writer.number(expression) for expression in expressions]
    return writer.statements, names


class _Writer:
    def __init__(self, booleans: frozenset[str]) -> None:
        self.statements: list[str] = []
        self._booleans = booleans
        self._known: dict[str, str] = {}
        self._numbers: dict[int, str] = {}

    def number(self, node: Node) -> str:
        """The name of ``node`` as FP32."""
        if id(node) not in self._numbers:  # a derivative holds the same objects many times over
            self._numbers[id(node)] = self._number(node)
        return self._numbers[id(node)]

    def _number(self, node: Node) -> str:
        if node.operation == "number":
            return self._named(f'tl.full([], float("{node.value!r}"), tl.float32)')
        if node.operation == "name" and node.value not in self._booleans:
            return str(node.value)
        if self._is_truth(node):
            return self._named(f"tl.where({self.truth(node)}, 1.0, 0.0)")
        if node.operation == "where":
            condition, yes, no = node.arguments
            return self._named(f"tl.where({self.truth(condition)}, {self.number(yes)}, {self.number(no)})")
        parts = [self.number(argument) for argument in node.arguments]
        if node.operation in CALLS:
            return self._named(CALLS[node.operation].format(*parts))
        return self._named(f"{parts[0]} {node.operation} {parts[1]}")

    def truth(self, node: Node) -> str:
        """The name of ``node`` as a condition, int1; a number holds where it is not 0."""
        if node.operation == "name" and node.value in self._booleans:
            return str(node.value)
        if node.operation in COMPARISONS:
            left, right = (self.number(argument) for argument in node.arguments)
            return self._named(f"{left} {node.operation} {right}")
        if node.operation in CONNECTIVES:
            return self._named(CONNECTIVES[node.operation].format(*map(self.truth, node.arguments)))
        return self._named(f"{self.number(node)} != 0.0")

    def _is_truth(self, node: Node) -> bool:
        named = node.operation == "name" and node.value in self._booleans
        return named or node.operation in COMPARISONS or node.operation in CONNECTIVES

    def _named(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = f"x{len(self.statements)}"
            self.statements.append(f"{self._known[text]} = {text}")
        return self._known[text]
