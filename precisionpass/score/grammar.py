"""The closed grammar of a score expression: text in, a small tree out. Nothing is evaluated as Python.

    s * 0.5 + t0          where(i - j < 128, s, -inf)          10 * tanh(s / 10)

Names: ``s`` (the scaled raw product, FP32), ``t0``, ``t1``, ... (score inputs), ``b h i j`` (batch, query head, row,
key, as FP32 numbers: exact up to 2^24), ``inf``. Operators: + - * / and unary minus; one comparison at a time
(< <= > >= == !=); and, or, not. Functions: tanh exp log sqrt abs, min(a, b), max(a, b), where(condition, a, b),
clamp(x, low, high).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache

FUNCTIONS = {"tanh": 1, "exp": 1, "log": 1, "sqrt": 1, "abs": 1, "min": 2, "max": 2, "where": 3, "clamp": 3}
BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
CONNECTIVES = {ast.And: "and", ast.Or: "or"}
NAME = re.compile(r"s|t\d{1,3}|[bhij]")
MAX_CHARACTERS = 20_000
MAX_DEPTH = 100


class ScoreError(ValueError):
    """A score expression outside the grammar: says which part and what is allowed."""


@dataclass(frozen=True)
class Node:
    """One piece of an expression: ``operation`` is "number", "name", an operator's sign or a function's name."""

    operation: str
    arguments: tuple[Node, ...] = ()
    value: float | str = 0.0

    def names(self) -> frozenset[str]:
        """The names the expression reads."""
        if self.operation == "name":
            return frozenset((str(self.value),))
        return frozenset().union(*(argument.names() for argument in self.arguments))

    def __str__(self) -> str:
        """The text that parses to this tree again."""
        return to_text(self)


def number(value: float) -> Node:
    """A constant."""
    return Node("number", (), float(value))


@lru_cache(maxsize=256)
def parse(text: str) -> Node:
    """The tree of ``text``. Raises ScoreError, with the offending part, for anything the grammar does not have."""
    if len(text) > MAX_CHARACTERS:
        raise ScoreError(f"score: {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ScoreError(f"score: {text!r} is not an expression: {error}") from None
    return _convert(tree.body, text, 0)


def _convert(node: ast.AST, text: str, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise ScoreError(f"score: nested more than {MAX_DEPTH} deep")

    def inner(*nodes: ast.AST) -> tuple[Node, ...]:
        return tuple(_convert(child, text, depth + 1) for child in nodes)

    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return number(value)
        case ast.Name(id="inf"):
            return number(float("inf"))
        case ast.Name(id=name) if NAME.fullmatch(name):
            return Node("name", (), name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return negative(*inner(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Node("not", inner(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return Node(BINARY[type(op)], inner(left, right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            return Node(COMPARISONS[type(op)], inner(left, right))
        case ast.BoolOp(op=op, values=values):
            first, *rest = inner(*values)
            for value in rest:
                first = Node(CONNECTIVES[type(op)], (first, value))
            return first
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if FUNCTIONS.get(name) == len(arguments):
            return Node(name, inner(*arguments))
    part = ast.get_source_segment(text.strip(), node) or text
    raise ScoreError(
        f"score: {part!r} is outside the grammar: names s, t0.., b, h, i, j, inf; numbers; + - * /; one comparison at"
        f" a time; and, or, not; {', '.join(f'{name}({count})' for name, count in FUNCTIONS.items())}"
    )


def negative(node: Node) -> Node:
    """``-node``, folded for a constant."""
    return number(-float(node.value)) if node.operation == "number" else Node("negative", (node,))


def to_text(node: Node) -> str:
    """Text of the grammar that parses to ``node`` again, fully bracketed."""
    if node.operation == "number":
        return repr(node.value)
    if node.operation == "name":
        return str(node.value)
    parts = [to_text(argument) for argument in node.arguments]
    if node.operation in FUNCTIONS:
        return f"{node.operation}({', '.join(parts)})"
    if node.operation == "negative":
        return f"(-{parts[0]})"
    if node.operation == "not":
        return f"(not {parts[0]})"
    return f"({parts[0]} {node.operation} {parts[1]})"
