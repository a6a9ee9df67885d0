"""The where language: `dtype == bf16 and seq_q >= 1024 and not causal`, parsed, never evaluated as Python.

Facts, whole numbers, decimal numbers and words; + - * // % on sizes; comparisons (chained too), `in (a, b)`; and, or,
not. `parse` turns the text into a small tree and refuses everything else; `Condition.evaluate` builds the value of the
tree with plain operators, so that symbolic sizes give one symbolic truth value.
"""

from __future__ import annotations

import ast
import operator
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from precisionpass.rules.condition_tree import ConditionError, TreeBuilder
from precisionpass.rules.facts import FACTS, FIGURE_FACTS, canonical_word

LONGEST = 2000
MOST_NODES = 400
DEEPEST = 24
_LETTERS = frozenset(string.ascii_letters + string.digits + string.whitespace + "_.+-*/%<>=!(),[]'\"")

_ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class MissingFact(LookupError):
    """The site does not have this fact, so the condition says nothing of it: the rule does not match."""


@dataclass(frozen=True)
class Condition:
    """A checked condition. Two conditions are equal when they mean the same word for word, however spaced.

    text: as written. names: the facts it reads, sorted. tree: nested tuples, operator first; canonical.
    """

    text: str = field(compare=False)
    names: tuple[str, ...]
    tree: tuple

    def missing(self, facts: Mapping[str, object]) -> tuple[str, ...]:
        """The facts it reads that this site does not have."""
        return tuple(name for name in self.names if facts.get(name) is None)

    def evaluate(
        self,
        facts: Mapping[str, object],
        *,
        and_: Callable[[Any, Any], Any] = operator.and_,
        or_: Callable[[Any, Any], Any] = operator.or_,
        not_: Callable[[Any], Any] = operator.not_,
    ) -> Any:
        """The truth value: a bool, or whatever comparing the symbolic sizes in `facts` gives.

        No truth value is ever asked for while building: for SymInts pass and_ and or_ as they are and
        not_=torch.sym_not, then guard the result once. Raises MissingFact where a fact is absent or None.
        """
        missing = self.missing(facts)
        if missing:
            raise MissingFact(missing[0])
        return _Evaluation(facts, and_, or_, not_).value(self.tree)


@dataclass(frozen=True)
class _Evaluation:
    facts: Mapping[str, object]
    and_: Callable[[Any, Any], Any]
    or_: Callable[[Any, Any], Any]
    not_: Callable[[Any], Any]

    def value(self, tree: tuple) -> Any:
        kind, *parts = tree
        if kind == "fact":
            return _plain(self.facts[parts[0]])
        if kind == "constant":
            return parts[0]
        values = [self.value(part) for part in parts]
        if kind == "not":
            return self.not_(values[0])
        if kind == "negative":
            return -values[0]
        if kind in ("and", "or"):
            joined = values[0]
            for value in values[1:]:
                joined = self.and_(joined, value) if kind == "and" else self.or_(joined, value)
            return joined
        return (_ARITHMETIC.get(kind) or _COMPARISONS[kind])(*values)


def _plain(value: object) -> object:
    """Words in the one spelling conditions use; everything else as it is."""
    return canonical_word(value) if isinstance(value, str) else value


@lru_cache(maxsize=1024)
def parse(text: str, of_figures: bool = False) -> Condition:
    """Check a condition. Raises ConditionError with the offset in `text` of what is wrong.

    of_figures: over what a running site records, not over what is known of a site beforehand.
    """
    if len(text) > LONGEST:
        raise ConditionError(f"the condition has {len(text)} characters; the limit is {LONGEST}", 0)
    if not text.strip():
        raise ConditionError("the condition is empty", 0)
    strange = next((at for at, letter in enumerate(text) if letter not in _LETTERS), None)
    if strange is not None:
        raise ConditionError(f"{text[strange]!r} has no meaning in a condition", strange)
    flat = "".join(" " if letter.isspace() else letter for letter in text)
    start = len(flat) - len(flat.lstrip())
    try:
        body = ast.parse(flat[start:], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        offset = (getattr(error, "offset", None) or len(flat)) - 1 + start
        raise ConditionError("the condition cannot be read here", min(max(offset, 0), len(text) - 1)) from None
    _bound(body)
    builder = TreeBuilder(start, FIGURE_FACTS if of_figures else FACTS)
    tree = builder.truth(body)
    if not builder.names:
        raise ConditionError("the condition asks nothing about the site", 0)
    return Condition(text=text, names=tuple(sorted(builder.names)), tree=tree)


def _bound(body: ast.AST) -> None:
    """Refuse a condition of too many terms or too deep, without recursion."""
    count = 0
    level: list[ast.AST] = [body]
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        count += len(level)
        if count > MOST_NODES:
            raise ConditionError("the condition has too many terms; write several rules", 0)
        if not level:
            return
    raise ConditionError(f"the condition nests deeper than {DEEPEST} levels", 0)
