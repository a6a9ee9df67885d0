"""The derivative of a score expression, as another expression of the same grammar: one table, for every printer.

Ties follow torch: clamp passes the whole gradient at its bounds, min and max give each side half, abs gives 0 at 0.
"""

from __future__ import annotations

from functools import lru_cache

from precisionpass.score.grammar import Node, negative, number

ZERO = number(0.0)
ONE = number(1.0)


@lru_cache(maxsize=256)
def derivative(node: Node, name: str) -> Node:
    """d node / d name. Conditions and index names are constants; a part without ``name`` is an exact zero."""
    if name not in node.names():
        return ZERO
    if node.operation == "name":
        return ONE
    slopes = tuple(derivative(argument, name) for argument in node.arguments)
    return _TABLE.get(node.operation, _constant)(node, node.arguments, slopes)


def _constant(node: Node, arguments: tuple[Node, ...], slopes: tuple[Node, ...]) -> Node:
    return ZERO


def add(left: Node, right: Node) -> Node:
    """left + right, without adding a literal zero."""
    if left == ZERO:
        return right
    return left if right == ZERO else Node("+", (left, right))


def multiply(left: Node, right: Node) -> Node:
    """left * right, without multiplying by a literal zero or one (0 * inf must stay 0 where nothing depends)."""
    if ZERO in (left, right):
        return ZERO
    if left == ONE:
        return right
    return left if right == ONE else Node("*", (left, right))


def _minus(left: Node, right: Node) -> Node:
    if right == ZERO:
        return left
    return negative(right) if left == ZERO else Node("-", (left, right))


def _where(condition: Node, yes: Node, no: Node) -> Node:
    return yes if yes == no else Node("where", (condition, yes, no))


def _divide(node: Node, arguments: tuple[Node, ...], slopes: tuple[Node, ...]) -> Node:
    top, bottom = arguments
    first = ZERO if slopes[0] == ZERO else Node("/", (slopes[0], bottom))
    second = multiply(Node("/", (Node("/", (top, bottom)), bottom)), slopes[1])
    return _minus(first, second)


def _extreme(sign: str):
    def rule(node: Node, arguments: tuple[Node, ...], slopes: tuple[Node, ...]) -> Node:
        left, right = arguments
        tie = multiply(number(0.5), add(*slopes))
        otherwise = _where(Node("==", (left, right)), tie, slopes[1])
        return _where(Node(sign, (left, right)), slopes[0], otherwise)

    return rule


def _clamp(node: Node, arguments: tuple[Node, ...], slopes: tuple[Node, ...]) -> Node:
    value, low, high = arguments
    inside = _where(Node("<", (value, low)), slopes[1], slopes[0])
    above = Node("or", (Node(">", (value, high)), Node("<", (high, low))))  # bounds that cross give the upper one
    return _where(above, slopes[2], inside)


def _absolute(node: Node, arguments: tuple[Node, ...], slopes: tuple[Node, ...]) -> Node:
    below = _where(Node("<", (arguments[0], ZERO)), negative(slopes[0]), ZERO)
    return _where(Node(">", (arguments[0], ZERO)), slopes[0], below)


_TABLE = {
    "+": lambda node, arguments, slopes: add(*slopes),
    "-": lambda node, arguments, slopes: _minus(*slopes),
    "*": lambda node, arguments, slopes: add(multiply(slopes[0], arguments[1]), multiply(arguments[0], slopes[1])),
    "/": _divide,
    "negative": lambda node, arguments, slopes: negative(slopes[0]),
    "tanh": lambda node, arguments, slopes: multiply(Node("-", (ONE, Node("*", (node, node)))), slopes[0]),
    "exp": lambda node, arguments, slopes: multiply(node, slopes[0]),
    "log": lambda node, arguments, slopes: Node("/", (slopes[0], arguments[0])),
    "sqrt": lambda node, arguments, slopes: Node("/", (multiply(number(0.5), slopes[0]), node)),
    "abs": _absolute,
    "min": _extreme("<"),
    "max": _extreme(">"),
    "where": lambda node, arguments, slopes: _where(arguments[0], slopes[1], slopes[2]),
    "clamp": _clamp,
}
