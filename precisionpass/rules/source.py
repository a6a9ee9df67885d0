"""From a rules file's bytes to plain data, with the place of every key and value.

PyYAML's parser gives events; everything above them is ours, so that nothing is constructed, expanded or guessed:
no anchors, aliases or tags, `no` and `on` are words, `1e-5` is a number, a key given twice is a problem.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from precisionpass.errors import RulesError, RulesProblem
from precisionpass.rules.nearest import shown
from precisionpass.rules.problems import Path

LARGEST_FILE = 256 * 1024
DEEPEST = 16
MOST_NODES = 20_000
LONGEST_NUMBER = 40  # characters
LARGEST_NUMBER = 1e300

# libyaml where PyYAML has it, else the same events from Python.
Parser: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_NOTHING = ("", "~", "null", "Null", "NULL")
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Compiled only where a file holds more than ASCII text.
_FORBIDDEN = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]"


@dataclass(frozen=True)
class Place:
    """line and column of a key and of its value, from 1."""

    key: tuple[int, int]
    value: tuple[int, int]


@dataclass
class Source:
    """One file being read: its name as shown to people, its text, and what was found so far."""

    file: str
    text: str
    lines: list[str] = field(default_factory=list)
    data: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    unusable: set[Path] = field(default_factory=set)
    problems: list[RulesProblem] = field(default_factory=list)

    def problem(self, code: str, message: str, line: int, column: int) -> RulesProblem:
        """A problem with the source line it is on."""
        shown_line = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        return RulesProblem(code, message, self.file, line, column, shown_line)

    def place(self, path: Path) -> Place:
        """The place of this path, or of the nearest one around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place((1, 1), (1, 1)))


def decode(content: bytes, file: str) -> str:
    """UTF-8 text without control characters. Raises RulesError."""
    if len(content) > LARGEST_FILE:
        raise _refused("PP100", f"the file is larger than {LARGEST_FILE // 1024} KiB; write less, or extend", file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"the file is not UTF-8 text: byte 0x{content[error.start]:02x} in line {line}; save it as UTF-8"
        raise _refused("PP100", message, file) from None
    is_plain = text.isascii() and text.replace("\n", "").replace("\r", "").replace("\t", "").isprintable()
    strange = None if is_plain else re.search(_FORBIDDEN, text)
    if strange:
        line = text.count("\n", 0, strange.start()) + 1
        column = strange.start() - text.rfind("\n", 0, strange.start())
        message = f"control character U+{ord(strange.group()):04X}; a rules file is plain text"
        raise RulesError([RulesProblem("PP100", message, file, line, column)])
    return text


def read(text: str, file: str) -> Source:
    """Parse. Raises RulesError where the text is no YAML or uses what rules files do not have."""
    source = Source(file, text, lines=re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text))
    try:
        _Reader(source, Parser(text)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        problem = source.problem("PP101", f"this is not YAML: {error.problem or error.context}", line, column)
        raise RulesError([problem]) from None
    except yaml.YAMLError as error:
        message = f"this is not YAML: {' '.join(str(error).split())[:120]}"
        raise RulesError([RulesProblem("PP101", message, file)]) from None
    return source


def _refused(code: str, message: str, file: str) -> RulesError:
    return RulesError([RulesProblem(code, message, file)])


class _Reader:
    """Reads events downwards, at most DEEPEST levels; what can be read past a problem is read."""

    def __init__(self, source: Source, parser: Any) -> None:
        self.source = source
        self.parser = parser
        self.nodes = 0

    def document(self) -> None:
        """One document, whose top is a group of keys."""
        self.parser.get_event()  # the stream's start
        if isinstance(self.parser.peek_event(), yaml.StreamEndEvent):
            raise _refused("PP106", "the file is empty; write version: 1 and rules", self.source.file)
        self.parser.get_event()  # the document's start
        self.source.data = self._node((), 0)
        self.parser.get_event()  # the document's end
        following = self.parser.peek_event()
        if not isinstance(following, yaml.StreamEndEvent):
            self._report("PP113", "a rules file is one document; remove what follows ---", following)

    def _node(self, path: Path, depth: int) -> Any:
        event = self.parser.get_event()
        self.nodes += 1
        if depth > DEEPEST or self.nodes > MOST_NODES:
            limit = f"nests deeper than {DEEPEST} levels" if depth > DEEPEST else f"has more than {MOST_NODES} values"
            self._report("PP113", f"the file {limit}", event)
            raise RulesError(self.source.problems)
        place = (event.start_mark.line + 1, event.start_mark.column + 1)
        known = self.source.places.get(path)
        self.source.places[path] = Place(known.key if known else place, place)
        if isinstance(event, yaml.AliasEvent):
            return self._bad(path, "PP113", "anchors and aliases are not part of a rules file; write it out", event)
        if event.anchor:
            self._report("PP113", "anchors and aliases are not part of a rules file; write it out", event)
        if event.tag:
            self._report("PP113", f"tags such as {shown(event.tag)} are not part of a rules file; remove it", event)
            self.source.unusable.add(path)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path, depth)
        return self._scalar(path, event)

    def _mapping(self, path: Path, depth: int) -> dict[str, Any]:
        group: dict[str, Any] = {}
        while not isinstance(self.parser.peek_event(), yaml.MappingEndEvent):
            key_event = self.parser.peek_event()
            if not isinstance(key_event, yaml.ScalarEvent):
                self._report("PP104", "a key must be text", key_event)
                self._node((*path, "?"), depth + 1)
                self._node((*path, "?"), depth + 1)
                continue
            self.parser.get_event()
            self.nodes += 1
            key = key_event.value
            place = (key_event.start_mark.line + 1, key_event.start_mark.column + 1)
            if key in group:
                first = self.source.places[(*path, key)].key[0]
                self._report("PP102", f"duplicate key {shown(key)}; it is given in line {first}", key_event)
                self._node((*path, key, "?"), depth + 1)
                continue
            self.source.places[(*path, key)] = Place(place, place)
            group[key] = self._node((*path, key), depth + 1)
        self.parser.get_event()
        return group

    def _sequence(self, path: Path, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(self.parser.peek_event(), yaml.SequenceEndEvent):
            items.append(self._node((*path, len(items)), depth + 1))
        self.parser.get_event()
        return items

    def _scalar(self, path: Path, event: Any) -> Any:
        text = event.value
        if event.style or event.tag:
            return text
        if text in _NOTHING:
            name = next((part for part in reversed(path) if isinstance(part, str)), "the file")
            return self._bad(path, "PP104", f"{shown(name)} has no value", event)
        if text in _TRUTHS:
            return _TRUTHS[text]
        is_integer = _INTEGER.fullmatch(text) is not None
        if not is_integer and not _DECIMAL.fullmatch(text):
            return text
        number = (int(text) if is_integer else float(text)) if len(text) <= LONGEST_NUMBER else math.inf
        if not math.isfinite(number) or abs(number) > LARGEST_NUMBER:
            return self._bad(path, "PP104", f"the number {shown(text)} is too large", event)
        return number

    def _bad(self, path: Path, code: str, message: str, event: Any) -> None:
        """Report a value that cannot be used; what it should have been is not asked again."""
        self._report(code, message, event)
        self.source.unusable.add(path)

    def _report(self, code: str, message: str, event: Any) -> None:
        mark = event.start_mark
        self.source.problems.append(self.source.problem(code, message, mark.line + 1, mark.column + 1))
