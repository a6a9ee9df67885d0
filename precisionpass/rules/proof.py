"""What can be proved of where conditions: that one never holds, that one follows from another.

Exact arithmetic on whole and real numbers: a condition becomes cases, each a list of literals, and a case is impossible
where its linear inequalities have no solution (Fourier and Motzkin's elimination, bounds of whole numbers rounded
inwards), or where words or flags contradict. No answer but "proved" means anything: what is too large is not proved.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

from precisionpass.rules.facts import FACTS

MOST_CASES = 128
MOST_BOUNDS = 300

Tree = tuple
Case = tuple[Tree, ...]
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_SWAPPED = {">": "<", ">=": "<="}


class _TooLarge(Exception):
    """Nothing is proved."""


@lru_cache(maxsize=4096)
def never(tree: Tree) -> bool:
    """Whether it is proved that this condition holds at no site. tree: of a Condition."""
    try:
        return all(_impossible(case) for case in _cases(tree, True))
    except _TooLarge:
        return False


def follows(weak: Tree, strong: Tree) -> bool:
    """Whether it is proved that `weak` holds wherever `strong` does."""
    return never(("and", strong, ("not", weak)))


def _cases(tree: Tree, positive: bool) -> list[Case]:
    """The condition, or its opposite, as cases of which one must hold: literals that hold together."""
    kind, *parts = tree
    if kind == "not":
        return _cases(parts[0], not positive)
    if kind in ("and", "or"):
        branches = [_cases(part, positive) for part in parts]
        if (kind == "or") == positive:
            return _counted([case for branch in branches for case in branch])
        joined: list[Case] = [()]
        for branch in branches:
            joined = _counted([(*one, *two) for one, two in product(joined, branch)])
        return joined
    if kind == "constant":
        return [()] if parts[0] is positive else []
    if kind == "fact":
        return [(("flag", parts[0], positive),)]
    return _comparison(kind if positive else _OPPOSITE[kind], *parts)


def _counted(cases: list[Case]) -> list[Case]:
    if len(cases) > MOST_CASES:
        raise _TooLarge
    return cases


def _comparison(sign: str, left: Tree, right: Tree) -> list[Case]:
    kind = _kind(left)
    if kind == "flag":
        both, neither = ("and", left, right), ("not", ("or", left, right))
        return _cases(("or", both, neither), sign == "==")
    if kind == "word":
        return [(_words(left, right, sign == "=="),)]
    if sign == "!=":
        return [(("<", left, right),), (("<", right, left),)]
    if sign in _SWAPPED:
        sign, left, right = _SWAPPED[sign], right, left
    return [((sign, left, right),)]


def _kind(tree: Tree) -> str:
    if tree[0] == "fact":
        return FACTS[tree[1]].type
    if tree[0] == "constant":
        return "flag" if isinstance(tree[1], bool) else "word" if isinstance(tree[1], str) else "number"
    return "size"


def _words(left: Tree, right: Tree, same: bool) -> Tree:
    """A word fact against a word; two facts against each other are a literal that is only compared with itself."""
    if left[0] == "constant":
        left, right = right, left
    if right[0] == "constant":
        return ("word", left[1], right[1], same)
    return ("flag", ("same words", *sorted((left[1], right[1]))), same)


def _impossible(case: Case) -> bool:
    flags: dict[Any, bool] = {}
    words: dict[str, str] = {}
    inequalities = _Inequalities()
    for kind, *parts in case:
        if kind == "flag" and flags.setdefault(parts[0], parts[1]) is not parts[1]:
            return True
        if kind == "word" and parts[2] and words.setdefault(parts[0], parts[1]) != parts[1]:
            return True
        if kind in ("<", "<=", "=="):
            inequalities.add(parts[0], parts[1], kind == "<")
        if kind == "==":
            inequalities.add(parts[1], parts[0], False)
    # No list of words is complete: "neither of these" is possible.
    excluded = {(name, word) for kind, name, word, same in (one for one in case if one[0] == "word") if not same}
    return bool(excluded & set(words.items())) or inequalities.contradict()


Sum = tuple[dict[Tree, Fraction], Fraction]  # a factor for each unknown, and a number


class _Inequalities:
    """Sums that are at most 0, or below 0. Unknowns are facts and what is no sum of facts: products and quotients."""

    def __init__(self) -> None:
        self.bounds: dict[frozenset, tuple[Fraction, bool]] = {}
        self.known: set[Tree] = set()
        self.false = False

    def add(self, left: Tree, right: Tree, is_strict: bool) -> None:
        """left <= right, or left < right."""
        self._keep(*_plus(self._sum(left), self._sum(right), -1), is_strict)

    def contradict(self) -> bool:
        """Whether there is no solution, by eliminating one unknown after the other."""
        while self.bounds and not self.false:
            unknowns = {unknown for factors in self.bounds for unknown, _ in factors}
            self._eliminate(min(unknowns, key=self._cost))
        return self.false

    def _sum(self, tree: Tree) -> Sum:
        kind, *parts = tree
        if kind == "constant":
            return {}, Fraction(parts[0])
        if kind == "fact":
            return self._unknown(tree)
        if kind == "negative":
            return _plus(({}, Fraction(0)), self._sum(parts[0]), -1)
        if kind in ("+", "-"):
            return _plus(self._sum(parts[0]), self._sum(parts[1]), 1 if kind == "+" else -1)
        first, second = self._sum(parts[0]), self._sum(parts[1])
        if kind == "*":
            if first[0] and second[0]:
                return self._unknown(("*", *sorted(parts, key=repr)))
            return _plus(({}, Fraction(0)), first if first[0] else second, (second if first[0] else first)[1])
        divisor = second[1]
        quotient = self._unknown(("//", *parts))
        rest = _plus(first, quotient, -divisor)  # 0 <= rest <= divisor - 1
        self._keep(*_plus(({}, Fraction(0)), rest, -1), False)
        self._keep(*_plus(rest, ({}, divisor - 1), -1), False)
        return quotient if kind == "//" else rest

    def _unknown(self, tree: Tree) -> Sum:
        one = ({tree: Fraction(1)}, Fraction(0))
        if tree not in self.known:
            self.known.add(tree)
            if tree[0] == "fact" and (FACTS[tree[1]].type == "size" or tree[1] == "dropout"):
                self._keep({tree: Fraction(-1)}, Fraction(0), False)
            if tree == ("fact", "dropout"):
                self._keep({tree: Fraction(1)}, Fraction(-1), False)
        return one

    def _keep(self, factors: dict[Tree, Fraction], number: Fraction, is_strict: bool) -> None:
        """factors * unknowns + number <= 0 (or < 0), unless as much is known."""
        if not factors:
            self.false |= number > 0 or (is_strict and number == 0)
            return
        scale = _scale(factors)
        factors, number = {unknown: factor * scale for unknown, factor in factors.items()}, number * scale
        if all(_is_whole(unknown) for unknown in factors):
            number = Fraction(math.floor(number) + 1 if is_strict else math.ceil(number))
            is_strict = False
        key = frozenset(factors.items())
        self.bounds[key] = max(self.bounds.get(key, (number, False)), (number, is_strict))
        if len(self.bounds) > MOST_BOUNDS:
            raise _TooLarge

    def _cost(self, unknown: Tree) -> tuple[bool, int, str]:
        """Those first that lose nothing between whole numbers, then those that leave the fewest bounds."""
        found = [factor for factors in self.bounds for name, factor in factors if name == unknown]
        upper = sum(factor > 0 for factor in found)
        return any(abs(factor) != 1 for factor in found), upper * (len(found) - upper), repr(unknown)

    def _eliminate(self, unknown: Tree) -> None:
        above, below = [], []
        for factors, bound in list(self.bounds.items()):
            factor = dict(factors).get(unknown)
            if factor is not None:
                (above if factor > 0 else below).append((dict(factors), *bound))
                del self.bounds[factors]
        for (high, high_number, high_strict), (low, low_number, low_strict) in product(above, below):
            together = _plus((high, high_number), (low, low_number), high[unknown] / -low[unknown])
            self._keep(*together, high_strict or low_strict)


def _plus(first: Sum, second: Sum, times: Fraction | int) -> Sum:
    factors = dict(first[0])
    for unknown, factor in second[0].items():
        factors[unknown] = factors.get(unknown, Fraction(0)) + factor * times
    return {unknown: factor for unknown, factor in factors.items() if factor}, first[1] + second[1] * times


def _scale(factors: dict[Tree, Fraction]) -> Fraction:
    """What makes the factors whole numbers without a common divisor."""
    whole = math.lcm(*(factor.denominator for factor in factors.values()))
    return Fraction(whole, math.gcd(*(int(factor * whole) for factor in factors.values())))


def _is_whole(unknown: Tree) -> bool:
    return unknown[0] != "fact" or FACTS[unknown[1]].type == "size"
