"""From Python's syntax tree to a condition's own: a whitelist with types; whatever is not named here is refused."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping

from precisionpass.rules.facts import FACTS, Fact, canonical_word
from precisionpass.rules.nearest import advice, shown

LARGEST = 2**63 - 1

_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_ORDER = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_TRUTHS = {"true": True, "True": True, "false": False, "False": False}
_REFUSED = {
    ast.Call: "calls are not part of a condition",
    ast.Attribute: "dots are not part of a condition",
    ast.Subscript: "brackets after a name are not part of a condition",
    ast.IfExp: "if and else are not part of a condition",
    ast.Lambda: "lambda is not part of a condition",
    ast.JoinedStr: "formatted text is not part of a condition",
    ast.Pow: "powers are not part of a condition; write the number out",
    ast.Div: "/ is not part of a condition; write // for whole numbers",
    ast.Is: "write == instead of is",
    ast.IsNot: "write != instead of is not",
}


class ConditionError(ValueError):
    """A condition that cannot be read. offset: where in its text, in characters from 0."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


class TreeBuilder:
    """Checks one condition and collects the facts it reads in `names`.

    Each method returns (type, tree) or a tree; types are "size", "number", "flag", "word" and "text" (a word whose
    fact is not known yet). start: how many characters were cut off before the first. facts: what may be asked.
    """

    def __init__(self, start: int, facts: Mapping[str, Fact] = FACTS) -> None:
        self.start = start
        self.facts = facts
        self.names: set[str] = set()

    def truth(self, node: ast.expr) -> tuple:
        """A part that must be true or false."""
        if isinstance(node, ast.BoolOp):
            return ("and" if isinstance(node.op, ast.And) else "or", *(self.truth(part) for part in node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ("not", self.truth(node.operand))
        if isinstance(node, ast.Compare):
            return self._compare(node)
        kind, tree = self._term(node)
        if kind == "flag":
            return tree
        name = ast.unparse(node)
        if kind == "text":
            raise self._error(node, f"unknown fact {shown(name)}; {advice(name, self.facts)}")
        ask = f"{name} == {self.facts[name].words[0]}" if kind == "word" else f"{name} > 0"
        raise self._error(node, f"{shown(name)} is not true or false; compare it, as in {ask}")

    def _compare(self, node: ast.Compare) -> tuple:
        """A chain `a < b <= c` is the pairs joined by and."""
        sides = [node.left, *node.comparators]
        pairs = [self._pair(op, sides[at], sides[at + 1]) for at, op in enumerate(node.ops)]
        return pairs[0] if len(pairs) == 1 else ("and", *pairs)

    def _pair(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> tuple:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List) or not right.elts:
                raise self._error(right, "after in, write the choices in parentheses, as in dtype in (bf16, fp16)")
            choices = [self._pair(ast.Eq(), left, choice) for choice in right.elts]
            any_of = choices[0] if len(choices) == 1 else ("or", *choices)
            return any_of if isinstance(op, ast.In) else ("not", any_of)
        if type(op) not in _ORDER:
            raise self._error(right, _REFUSED[type(op)])
        sign = _ORDER[type(op)]
        left_kind, left_tree = self._term(left)
        right_kind, right_tree = self._term(right)
        kinds = {left_kind, right_kind}
        if kinds <= {"size", "number"}:
            return (sign, left_tree, right_tree)
        if kinds == {"word", "text"}:
            fact, text, at = (left, right_tree, right) if left_kind == "word" else (right, left_tree, left)
            self._check_word(fact, text[1], at)
        elif "text" in kinds:
            at, tree = (left, left_tree) if left_kind == "text" else (right, right_tree)
            raise self._error(at, f"unknown fact {shown(tree[1])}; {advice(tree[1], self.facts)}")
        elif len(kinds) > 1:
            raise self._error(left, f"{ast.unparse(left)} and {ast.unparse(right)} cannot be compared")
        if sign not in ("==", "!="):
            raise self._error(left, f"{ast.unparse(left)} has no order; write == or !=")
        return (sign, left_tree, right_tree)

    def _check_word(self, fact: ast.expr, word: str, at: ast.expr) -> None:
        name = ast.unparse(fact)
        words = self.facts[name].words
        if word not in words:
            raise self._error(at, f"{shown(word)} is no {name}; {advice(word, words)}")

    def _term(self, node: ast.expr) -> tuple[str, tuple]:
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            kind, tree = self._term(node.operand)
            if kind not in ("size", "number"):
                raise self._error(node, f"{ast.unparse(node.operand)} is not a number")
            return kind, tree if isinstance(node.op, ast.UAdd) else ("negative", tree)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.BoolOp | ast.Compare | ast.UnaryOp):
            # Also what keeps the tree linear in the text: chains and `in` repeat a side, and a side never nests.
            raise self._error(node, "only facts and numbers can be compared; join truths with and, or, not")
        raise self._error(node, _REFUSED.get(type(node), "this is not part of a condition"))

    def _name(self, node: ast.Name) -> tuple[str, tuple]:
        if node.id in _TRUTHS:
            return "flag", ("constant", _TRUTHS[node.id])
        if node.id not in self.facts:
            return "text", ("constant", canonical_word(node.id))
        self.names.add(node.id)
        return self.facts[node.id].type, ("fact", node.id)

    def _constant(self, node: ast.Constant) -> tuple[str, tuple]:
        value = node.value
        if isinstance(value, bool):
            return "flag", ("constant", value)
        if isinstance(value, str):
            return "text", ("constant", canonical_word(value))
        if isinstance(value, int) and value <= LARGEST:
            return "size", ("constant", value)
        if isinstance(value, float) and math.isfinite(value):
            return "number", ("constant", value)
        if isinstance(value, int | float):
            raise self._error(node, "this number is too large")
        raise self._error(node, "this is not part of a condition")

    def _arithmetic(self, node: ast.BinOp) -> tuple[str, tuple]:
        sign = _ARITHMETIC.get(type(node.op))
        if sign is None:
            allowed = " ".join(_ARITHMETIC.values())
            raise self._error(node, _REFUSED.get(type(node.op), f"the arithmetic of a condition is {allowed}"))
        left_kind, left = self._term(node.left)
        right_kind, right = self._term(node.right)
        for side, kind, tree in ((node.left, left_kind, left), (node.right, right_kind, right)):
            if kind == "text":
                raise self._error(side, f"unknown fact {shown(tree[1])}; {advice(tree[1], self.facts)}")
            if kind != "size":
                raise self._error(side, f"{ast.unparse(side)} is not a whole number, so there is no {sign} on it")
        if sign in ("//", "%") and not (right[0] == "constant" and right[1] > 0):
            raise self._error(node.right, f"on the right of {sign} there must be a whole number above 0")
        return "size", (sign, left, right)

    def _error(self, node: ast.expr, message: str) -> ConditionError:
        return ConditionError(message, self.start + node.col_offset)
