"""The score expression of a site: what happens between Q K^T and the softmax, as one sympy expression.

Symbols: `s` the raw product, `t0`, `t1`, ... tensor reads. Only the constructors below are used: an infinity is a
symbol of its own (sympy would drop `s` from `s - inf`), conditions are functions (never arithmetic), nothing is
simplified. The text printed here is the closed grammar of `precisionpass.score.grammar`, which the ops read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy

RAW = sympy.Symbol("s", real=True)
INFINITY = sympy.Symbol("inf", real=True)


class Tanh(sympy.Function):
    """tanh, left alone by sympy's own rules."""


class Clamp(sympy.Function):
    """Clamp(x, low, high)"""


class Where(sympy.Function):
    """Where(t, a, b): a where the boolean read t holds, else b."""


def read(position: int) -> sympy.Symbol:
    """The symbol of the tensor read at `position` of a site's reads."""
    return sympy.Symbol(f"t{position}", real=True)


def number(value: float) -> sympy.Expr:
    """A constant as it stands in an expression; infinities become a symbol."""
    if value in (float("inf"), float("-inf")):
        return INFINITY if value > 0 else -INFINITY
    return sympy.Integer(value) if value == int(value) and abs(value) < 1e6 else sympy.Float(value)


_SUM, _PRODUCT, _FACTOR = 1, 2, 3


def text(expression: sympy.Expr, names: Mapping[sympy.Symbol, sympy.Symbol] | None = None) -> str:
    """The expression in the closed grammar that the ops parse, with other names for its symbols where given."""
    return _Printer(names or {}, exact=True).show(expression, _SUM)


def formula(expression: sympy.Expr, names: Mapping[sympy.Symbol, sympy.Symbol]) -> str:
    """The expression as a person reads it, with these names; numbers to six digits."""
    return _Printer(names, exact=False).show(expression, _SUM)


@dataclass(frozen=True)
class _Printer:
    names: Mapping[sympy.Symbol, sympy.Symbol]
    exact: bool

    def show(self, e: sympy.Expr, inside: int) -> str:
        """`e` as it stands within a sum, a product or a factor: bracketed where it binds less tightly."""
        shown, binds = self._shown(e)
        return f"({shown})" if binds < inside else shown

    def _shown(self, e: sympy.Expr) -> tuple[str, int]:
        if isinstance(e, Tanh | Clamp | Where):
            return f"{type(e).__name__.lower()}({', '.join(self.show(a, _SUM) for a in e.args)})", _FACTOR
        if e.is_Symbol:
            return self.names.get(e, e).name, _FACTOR  # type: ignore[attr-defined]
        if e == -INFINITY:
            return "-inf", _SUM
        if e.is_Number:
            return self._number(float(e)), _FACTOR if e >= 0 else _SUM
        if e.is_Add:
            return " + ".join(self.show(a, _PRODUCT) for a in _scores_first(e.args)), _SUM
        if e.is_Mul:
            over = [a for a in e.args if a.is_Pow and a.exp == -1]
            plain = [self.show(a, _FACTOR) for a in _scores_first(tuple(a for a in e.args if a not in over))]
            divided = "".join(f" / {self.show(a.base, _FACTOR)}" for a in over)
            return " * ".join(plain or ["1"]) + divided, _PRODUCT
        if e.is_Pow and e.exp == -1:
            return f"1 / {self.show(e.base, _FACTOR)}", _PRODUCT
        if e.is_Pow and e.exp == 2:
            return f"{self.show(e.base, _FACTOR)} * {self.show(e.base, _FACTOR)}", _PRODUCT
        raise ValueError(f"{e} is outside the closed grammar of score expressions")

    def _number(self, value: float) -> str:
        if value == int(value) and abs(value) < 1e6:
            return str(int(value))
        return repr(value) if self.exact else f"{value:.6g}"


def _scores_first(arguments):
    return sorted(arguments, key=lambda a: (not a.has(RAW), a.is_Number, str(a)))


@dataclass(frozen=True)
class Parts:
    """An expression taken apart as the attention op computes it: score, softcap, biases, mask, from inside out."""

    scale: sympy.Expr  # of the raw product
    score: sympy.Expr  # what is left for the general path, over s = scale * q.k; RAW where nothing is
    softcap: sympy.Expr  # 0: none
    biases: tuple[int, ...]  # reads that are added
    masks: tuple[tuple[int, bool], ...]  # (read, value that allows): -inf elsewhere


def take_apart(expression: sympy.Expr) -> Parts:
    """Classify a score expression. What fits no part stays in `score`, so that nothing is ever lost."""
    masks, biases = [], []
    rest = expression
    while True:
        if isinstance(rest, Where) and -INFINITY in rest.args[1:] and rest.has(RAW):
            allowed = rest.args[2] == -INFINITY
            masks.append((_position(rest.args[0]), allowed))
            rest = rest.args[1] if allowed else rest.args[2]
            continue
        if rest.is_Add:
            added = [a for a in rest.args if a.is_Symbol and a != RAW]
            scores = [a for a in rest.args if a not in added]
            if added and scores:
                biases += [_position(a) for a in added]
                rest = sympy.Add(*scores)
                continue
        break
    scale, softcap, score = sympy.Integer(1), sympy.Integer(0), rest
    capped, bound = _factor(rest, Tanh)
    if (
        capped is not None
        and _linear(capped.args[0]) is not None
        and (bound * _linear(capped.args[0])).is_positive is not False
    ):
        scale, softcap, score = bound * _linear(capped.args[0]), bound, RAW
        if not (softcap.is_Number and softcap > 0):
            scale, softcap, score = sympy.Integer(1), sympy.Integer(0), rest
    elif _linear(rest) is not None:
        scale, score = _linear(rest), RAW
    return Parts(scale, score, softcap, tuple(biases), tuple(masks))


def outer_masks(e: sympy.Expr) -> Iterator[tuple[Where, sympy.Expr]]:
    """The masks that only sums, other masks and positive constants stand around, each with what multiplies its fill."""
    factor = sympy.Integer(1)
    while e.has(RAW) and (e.is_Add or e.is_Mul or isinstance(e, Where)):
        if isinstance(e, Where):
            yield e, factor
        inner = [part for part in e.args if part.has(RAW)]
        others = [part for part in e.args if not part.has(RAW)]
        if len(inner) != 1 or (e.is_Mul and not all(part.is_Number and part > 0 for part in others)):
            return
        factor *= sympy.Mul(*others) if e.is_Mul else 1
        e = inner[0]


def _factor(expression: sympy.Expr, function):
    """(the one factor of this function, the product of the others)"""
    factors = expression.args if expression.is_Mul else (expression,)
    found = [f for f in factors if isinstance(f, function)]
    if len(found) != 1:
        return None, None
    return found[0], sympy.Mul(*[f for f in factors if f is not found[0]])


def _linear(expression: sympy.Expr):
    """c where the expression is c * s and c reads no tensor, else None."""
    factors = expression.args if expression.is_Mul else (expression,)
    rest = [f for f in factors if f != RAW]
    if len(rest) != len(factors) - 1 or any(f.has(RAW) or _reads(f) for f in rest):
        return None
    return sympy.Mul(*rest)


def _reads(expression: sympy.Expr) -> list[int]:
    return sorted(_position(a) for a in expression.free_symbols if a.name.startswith("t") and a.name[1:].isdigit())


def _position(symbol: sympy.Basic) -> int:
    return int(symbol.name[1:])  # type: ignore[attr-defined]


def reads(expression: sympy.Expr) -> list[int]:
    """Positions of the tensor reads of an expression, ascending."""
    return _reads(expression)
