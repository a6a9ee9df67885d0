"""A site's formula typeset: from its text to MathML, which browsers draw without a script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:e[-+]?\d+)?)|([^\W\d]\w*(?:\.\w+)*)|(<=|>=|\^T|\^\d+|[-+*/()\[\],<>=]))")
_SIGNS = {"<=": "≤", ">=": "≥", "*": "·", "-": "−"}
_RELATIONS = ("<=", ">=", "<", ">", "=")
_UNDER = ("softmax", "log_softmax", "dropout")  # what follows their first argument stands below
LONGEST = 2000


def mathml(formula: str) -> str:
    """The formula as a <math> element; "" where it is not in the language of formulas, and is shown as it is.

    Understood: sums, products, quotients, powers as in x^2, comparisons, calls, indices in brackets, QK^T.
    """
    try:
        tokens = _tokens(formula)
        reader = _Reader(tokens)
        inside = reader.relation()
        if reader.position != len(tokens):
            return ""
    except (_NoFormula, RecursionError):
        return ""
    return f'<math display="block" alttext="{escape(formula)}">{inside}</math>'


class _NoFormula(Exception):
    """The text is not in the language of formulas."""


def _tokens(formula: str) -> list[str]:
    tokens, place = [], 0
    if len(formula) > LONGEST:
        raise _NoFormula
    while place < len(formula.rstrip()):
        found = _TOKEN.match(formula, place)
        if found is None:
            raise _NoFormula
        tokens.append(found[1] or found[2] or found[3])
        place = found.end()
    return tokens


@dataclass
class _Reader:
    """Reads tokens by recursive descent; every method gives the MathML of what it has read.

    bracketed: what stands inside the brackets, where the factor just read is a pair of them.
    """

    tokens: list[str]
    position: int = 0
    bracketed: str | None = None

    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """The next token, if it is one of these, is passed and given; else ""."""
        token = self.next()
        if token and token in wanted:
            self.position += 1
            return token
        return ""

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise _NoFormula

    def relation(self) -> str:
        left = self.sum()
        if sign := self.take(*_RELATIONS):
            left += _operator(sign) + self.sum()
        return f"<mrow>{left}</mrow>"

    def sum(self) -> str:
        terms = self.product()
        while sign := self.take("+", "-"):
            terms += _operator(sign) + self.product()
        return terms

    def product(self) -> str:
        factors = self.factor()
        while True:
            if self.take("*"):
                factors += _operator("*") + self.factor()
                self.bracketed = None
            elif self.take("/"):
                factors = factors if self.bracketed is None else self.bracketed
                factors = f"<mfrac><mrow>{factors}</mrow><mrow>{self.factor(bare=True)}</mrow></mfrac>"
                self.bracketed = None
            elif self.next()[:1].isalpha():
                factors += '<mspace width="0.25em"/>' + self.factor()
                self.bracketed = None
            else:
                return factors

    def factor(self, bare: bool = False) -> str:
        """bare: brackets around all of it are left out, as under a fraction's line."""
        if self.take("-"):
            return _operator("-") + self.factor()
        if self.take("("):
            inside = self.relation()
            self.need(")")
            self.bracketed = inside
            return inside if bare else _bracketed(inside)
        found = self.atom()
        self.bracketed = None
        return found

    def atom(self) -> str:
        token = self.next()
        self.position += 1
        if token[:1].isdigit():
            return _number(token)
        if not token or not (token[0].isalpha() or token[0] == "_"):
            raise _NoFormula
        if self.take("("):
            return self.call(token)
        if self.take("["):
            indices = self.list("]")
            return f"<msub>{_name(token)}<mrow>{_operator(',').join(indices)}</mrow></msub>"
        if self.take("^T"):
            *before, last = token
            return "".join(map(_name, before)) + f'<msup>{_name(last)}<mi mathvariant="normal">T</mi></msup>'
        if self.next()[:1] == "^":
            return f"<msup>{_name(token)}<mn>{self.take(self.next())[1:]}</mn></msup>"
        return _name(token)

    def call(self, name: str) -> str:
        first, *others = self.list(")")
        if name == "sqrt" and not others:
            return f"<msqrt>{first}</msqrt>"
        comma = _operator(",")
        if name in _UNDER and others:
            return f"<msub>{_name(name)}<mrow>{comma.join(others)}</mrow></msub>{_bracketed(first)}"
        return _name(name) + _bracketed(comma.join([first, *others]))

    def list(self, end: str) -> list[str]:
        items = [self.relation()]
        while self.take(","):
            items.append(self.relation())
        self.need(end)
        return items


def _operator(sign: str) -> str:
    return f"<mo>{escape(_SIGNS.get(sign, sign))}</mo>"


def _bracketed(inside: str) -> str:
    grows = "" if "<mfrac>" in inside else ' stretchy="false"'
    return f"<mrow><mo{grows}>(</mo>{inside}<mo{grows}>)</mo></mrow>"


def _name(name: str) -> str:
    return f"<mi>{escape(name)}</mi>"


def _number(text: str) -> str:
    digits, _, exponent = text.partition("e")
    if not exponent:
        return f"<mn>{digits}</mn>"
    power = f"<msup><mn>10</mn><mn>{'−' if exponent[0] == '-' else ''}{int(exponent.lstrip('+-'))}</mn></msup>"
    return power if digits == "1" else f"<mn>{digits}</mn><mo>·</mo>{power}"
