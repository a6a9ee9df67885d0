"""Patterns over dotted module names: a glob, or `re:` and a regular expression for the whole name.

model.layers.*.self_attn    * is any text within one part: layers.0, layers.17, not layers.0.attn
model.layers.**             ** is any number of whole parts, none included: model.layers and all below it
**.self_attn                at any depth, and at the top
layers.[0-3].attn?          [..] is one character of a set, ? is any one character
re:layers\\.(\\d+)\\.attn       matches the whole name; ** and * have no meaning of their own here
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from functools import lru_cache

LONGEST = 200
MOST_REPEATS = 6
MOST_WIDE = 4  # repeats of what most characters are, as in .*
_WIDE = (".", r"\w", r"\W", r"\S", r"\D")
_PLAIN = re.compile(r"[\w\-*?\[\]!$<>]*")


class PatternError(ValueError):
    """A pattern that cannot be read."""


def check_pattern(pattern: str) -> str:
    """The pattern itself. Raises PatternError; never takes longer than the pattern is long."""
    if not pattern:
        raise PatternError('the pattern is empty; the root module is matched by "**"')
    if len(pattern) > LONGEST:
        raise PatternError(f"the pattern has {len(pattern)} characters; the limit is {LONGEST}")
    if pattern.startswith("re:"):
        _check_expression(pattern[3:])
        return pattern
    for part in pattern.split("."):
        _check_part(part, pattern)
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a checked pattern matches the whole of a dotted name; "" is the root module."""
    if pattern.startswith("re:"):
        return _expression(pattern[3:]).fullmatch(name) is not None
    return _match_parts(tuple(pattern.split(".")), tuple(name.split(".")) if name else ())


def _match_parts(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    """Part by part: reached[i] says that the pattern so far matches the first i parts of the name."""
    reached = [True] + [False] * len(name)
    for part in pattern:
        if part == "**":
            first = reached.index(True) if True in reached else len(reached)
            reached = [index >= first for index in range(len(reached))]
            continue
        expression = _part(part)
        steps = [reached[index] and expression.match(name[index]) is not None for index in range(len(name))]
        reached = [False, *steps]
    return reached[-1]


@lru_cache(maxsize=4096)
def _part(part: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(part))


@lru_cache(maxsize=1024)
def _expression(text: str) -> re.Pattern[str]:
    return re.compile(text)


def _check_part(part: str, pattern: str) -> None:
    if not part:
        raise PatternError("two dots meet, or a dot is first or last")
    if "**" in part and part != "**":
        raise PatternError(f'** must be a whole part between dots, as in "layers.**", not "{part}"')
    opened = re.sub(r"\[!?\]?[^\[\]]*\]", "", part)
    if "[" in opened or "]" in opened:
        raise PatternError(f'a [ without its ] is in "{part}"')
    backwards = next((one for one in re.findall(r"\w-\w", part) if one[0] > one[2] and "[" in part), None)
    if backwards:
        raise PatternError(f"the range {backwards} runs backwards")
    if not _PLAIN.fullmatch(part):
        strange = next(letter for letter in part if not _PLAIN.fullmatch(letter))
        raise PatternError(f'{strange!r} is in no module name; for a regular expression write "re:..."')


def _check_expression(text: str) -> None:
    """Refuse what can take for ever on a long name: a repeat within a repeat, many repeats, back references."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(text)
    except (re.error, OverflowError, RecursionError, MemoryError, Warning) as error:
        reason = "it is ambiguous" if isinstance(error, Warning) else getattr(error, "msg", "it is too large")
        raise PatternError(f"the regular expression cannot be read: {reason}") from None
    repeats = wide = 0
    groups: list[bool] = []  # for each open group: whether it holds a repeat or a choice
    closed = False  # whether the group that just closed does
    before = ""
    for piece in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[^:)]|.", text, re.DOTALL):
        token = piece.group()
        if (token[0] == "\\" and token[1:].isdigit()) or token.startswith("(?"):
            raise PatternError("back references, look-around and inline flags are not part of module patterns")
        is_lazy = token == "?" and before in ("*", "+", "?", "}")
        if token in ("*", "+", "{", "?") and before != "(" and not is_lazy:
            if closed:
                raise PatternError("a repeated group must not hold a repeat or a choice")
            repeats += 1
            wide += before in _WIDE or before.startswith("[^")
            groups = [True] * len(groups)
        elif token == "|":
            groups = [True] * len(groups)
        elif token == "(":
            groups.append(False)
        closed = groups.pop() if token == ")" and groups else False
        before = token
    if wide > MOST_WIDE:
        raise PatternError(f"more than {MOST_WIDE} repeats of any character in one regular expression")
    if repeats > MOST_REPEATS:
        raise PatternError(f"more than {MOST_REPEATS} repeats in one regular expression")
