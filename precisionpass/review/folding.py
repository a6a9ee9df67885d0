"""Fold what is the same: names that differ only in integers, and records that differ only in their place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar

from precisionpass.review.plain import plain

if TYPE_CHECKING:
    from precisionpass.review.report import NearMissRecord, SiteRecord

Record = TypeVar("Record", "SiteRecord", "NearMissRecord")

# Canonical integers only: `01` and numbers of ten and more digits stay text, so that unfolding gives the same name.
_INTEGER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")
_FOLDED = re.compile(r"\{([0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)\}")
MOST_UNFOLDED = 10_000


@dataclass(frozen=True)
class Group(Generic[Record]):
    """Records that are the same but for their place.

    record: stands for all: the first of them that has its calls, else the first. modules: the name of each, once.
    names: the same, folded.
    sources, graphs: where they are, folded. count: how many sites they are together.
    """

    record: Record
    modules: tuple[str, ...]
    names: tuple[str, ...]
    sources: str
    graphs: str
    count: int


def group_records(records: Iterable[Record]) -> list[Group[Record]]:
    """The records in groups, in the order in which each group first appears."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        alike.setdefault(likeness(record), []).append(record)
    return [_group(members) for members in alike.values()]


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names with their integers folded: h.0.attn, h.1.attn, h.2.attn -> h.{0-2}.attn.

    The result stands for exactly the names given, each once, in the order in which each pattern first appears.
    """
    patterns: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        literals = tuple(_INTEGER.split(name))
        patterns.setdefault(literals, set()).add(tuple(int(number) for number in _INTEGER.findall(name)))
    return tuple(_spelled(literals, box) for literals, points in patterns.items() for box in _boxes(points))


def unfold(folded: str) -> tuple[str, ...]:
    """The names that a folded one stands for: h.{0-1,3}.attn -> h.0.attn, h.1.attn, h.3.attn; patterns stay patterns.

    Raises ValueError where there would be more than 10 000 of them.
    """
    parts = _FOLDED.split(folded)
    literals, slots = parts[::2], [_ranges(numbers) for numbers in parts[1::2]]
    if prod(sum(map(len, ranges)) for ranges in slots) > MOST_UNFOLDED:
        raise ValueError(f"its numbers stand for more than {MOST_UNFOLDED} names")
    return tuple(
        literals[0] + "".join(f"{number}{literal}" for number, literal in zip(box, literals[1:], strict=True))
        for box in product(*(chain(*ranges) for ranges in slots))
    )


def _ranges(text: str) -> list[range]:
    """0-1,3 as [range(0, 2), range(3, 4)]."""
    pairs = [run.partition("-") for run in text.split(",")]
    return [range(int(first), int(last or first) + 1) for first, _, last in pairs]


def fold_integers(numbers: Iterable[int]) -> str:
    """Integers as ranges with gaps: 0, 1, 2, 3, 5 -> "0-3,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def fold_sources(sources: Iterable[str]) -> str:
    """Places by file: "a.py:3", "a.py:7", "b.py:1" -> "a.py:3,7 b.py:1"."""
    files: dict[str, set[int]] = {}
    others: list[str] = []
    for source in sources:
        file, _, line = source.rpartition(":")
        if file and _INTEGER.fullmatch(line):
            files.setdefault(file, set()).add(int(line))
        elif source and source not in others:
            others.append(source)
    return " ".join([*(f"{file}:{fold_integers(lines)}" for file, lines in files.items()), *others])


def _group(members: Sequence[Record]) -> Group[Record]:
    modules = tuple(dict.fromkeys(member.module for member in members))
    return Group(
        record=next((member for member in members if getattr(member, "calls", None)), members[0]),
        modules=modules,
        names=fold_names(modules),
        sources=fold_sources(member.source for member in members),
        graphs=" ".join(fold_names(member.graph for member in members)),
        count=sum(getattr(member, "count", 1) for member in members),
    )


def likeness(record: Record) -> str:
    """Everything about a record but its place, as a key: the records of one group have the same."""
    content = plain(replace(record, module="", source="", graph=""))
    assert isinstance(content, dict)
    return json.dumps(content | {"count": 1}, sort_keys=True)


def _boxes(points: set[tuple[int, ...]]) -> list[tuple[frozenset[int], ...]]:
    """Disjoint products of integer sets that together are exactly the points: merged slot by slot, last slot first."""
    boxes = [tuple(frozenset([number]) for number in point) for point in sorted(points)]
    for slot in reversed(range(len(boxes[0]))):
        merged: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
        for box in boxes:
            others = box[:slot] + box[slot + 1 :]
            merged[others] = merged.get(others, frozenset()) | box[slot]
        boxes = [(*others[:slot], values, *others[slot:]) for others, values in merged.items()]
    return boxes


def _spelled(literals: tuple[str, ...], box: tuple[frozenset[int], ...]) -> str:
    slots = [fold_integers(values) if len(values) == 1 else f"{{{fold_integers(values)}}}" for values in box]
    return literals[0] + "".join(slot + literal for slot, literal in zip(slots, literals[1:], strict=True))
