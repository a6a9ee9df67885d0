"""Did you mean ...? The nearest of the words that would have been right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from precisionpass.errors import printable

LONGEST_SHOWN = 40


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The nearest choice in a half sentence, or "" where none is near."""
    known = sorted(choices)
    by_lower = {choice.lower(): choice for choice in known}
    near = get_close_matches(word[:LONGEST_SHOWN].lower(), by_lower, n=1, cutoff=0.6)
    return f'did you mean "{by_lower[near[0]]}"?' if near else ""


def or_list(choices: Iterable[str]) -> str:
    """The choices in quotes, the last two joined by or."""
    quoted = [f'"{choice}"' for choice in choices]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def advice(word: str, choices: Iterable[str]) -> str:
    """Did you mean, else all choices."""
    known = list(choices)
    return did_you_mean(word, known) or f"choose {or_list(known)}"


def shown(value: object) -> str:
    """A value a user wrote, as it looks in YAML, cut to one short line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list | tuple):
        return "a list"
    text = printable(" ".join(value.split())) if isinstance(value, str) else f"{value!r}"
    text = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
    return f'"{text}"' if isinstance(value, str) else text
