"""Values and names made safe to write: plain data for JSON, and text that cannot break a line or a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: object) -> object:
    """The value as JSON can hold it: records and mappings become dicts, tuples lists; no infinities, no addresses.

    A record's fields that are no part of its identity are left out.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain(held) for held in value]
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.compare}
    return _ADDRESS.sub("", str(value))


def shown(text: object, limit: int = 120) -> str:
    """Text as one printable line of at most `limit` characters.

    Control characters, line ends, and marks that turn the direction of writing appear as escapes (\\n, \\u202e); what
    is too long loses its middle and says how long it was. The full text is in report.json.
    """
    whole = str(text)
    line = "".join(letter if letter.isprintable() else _escape(letter) for letter in whole[: limit + 1])
    if len(whole) <= limit and len(line) <= limit:
        return line
    note = f"...({len(whole)} characters)..."
    end = "".join(letter if letter.isprintable() else _escape(letter) for letter in whole[-(limit // 4) :])
    kept = max(2, limit - len(note))
    tail = end[-(kept // 4) :]
    return f"{line[: kept - len(tail)]}{note}{tail}"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
