"""From a preset's name, a file or a list of rules to a RuleSet, or every problem at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from precisionpass.errors import RulesError, RulesProblem
from precisionpass.rules import presets
from precisionpass.rules.model import FROM_A_FILE, MOST_RULES, OnTrouble, Origin, Rule, RulesFile
from precisionpass.rules.nearest import did_you_mean, shown
from precisionpass.rules.not_yet import NOT_YET_PRESETS
from precisionpass.rules.problems import Finding, findings_of
from precisionpass.rules.ruleset import RuleSet
from precisionpass.rules.source import LARGEST_FILE, Source, decode, read

MOST_FILES = 32
MOST_PROBLEMS = 200
SUFFIXES = (".yaml", ".yml")

RulesSource = str | os.PathLike[str] | RuleSet | Sequence[Rule]


@dataclass(frozen=True)
class _Loaded:
    """One checked file and what it extends, strongest first."""

    source: Source
    file: RulesFile
    rules: tuple[Rule, ...]
    bases: tuple[_Loaded, ...]


def load(source: RulesSource) -> RuleSet:
    """Load rules.

    source: the name of a preset, a path (with a slash, or ending in .yaml or .yml), a list of Rule, or a RuleSet, which
    is returned as it is.
    Raises RulesError with every problem found; TypeError for anything else.
    """
    if isinstance(source, RuleSet):
        return source
    if isinstance(source, str | os.PathLike):
        return _from_files(os.fspath(source))
    if isinstance(source, Sequence) and all(isinstance(rule, Rule) for rule in source):
        return _from_python(tuple(source))
    raise TypeError(f"rules: a preset's name, a path, a list of Rule or a RuleSet, not {type(source).__name__}")


def is_path(text: str) -> bool:
    """Whether the text means a file and not a preset."""
    return text.endswith(SUFFIXES) or "/" in text or os.sep in text


def _from_python(rules: tuple[Rule, ...]) -> RuleSet:
    seen: set[str] = set()
    problems = []
    for rule in rules:
        if rule.id in seen:
            problems.append(RulesProblem("PP110", f'two rules have the id "{rule.id}"'))
        seen.add(rule.id)
    if problems:
        raise RulesError(problems)
    return RuleSet(name="python", rules=rules)


def _from_files(text: str) -> RuleSet:
    if is_path(text):
        path = Path(text)
        loaded = _Loader().file(path, text, ())
    else:
        path = presets.find(text)
        loaded = _Loader().file(path, path.name, ())
    return _merged(loaded, path.stem)


class _Loader:
    """Reads a file and, downwards, what it extends."""

    def __init__(self) -> None:
        self.count = 0

    def file(self, path: Path, name: str, chain: tuple[Path, ...]) -> _Loaded:
        """Read and check one file. chain: the files on the way to it, resolved."""
        self.count += 1
        source = read(decode(_content(path, name), name), name)
        checked = _checked(source)
        bases: list[_Loaded] = []
        in_bases: list[RulesProblem] = []
        for index, base in enumerate(_extends(source)):
            try:
                bases.append(self._base(source, base, index, path, (*chain, path.resolve())))
            except RulesError as error:
                in_bases.extend(error.problems)
        own = sorted(source.problems, key=lambda problem: (problem.line, problem.column))
        if own or in_bases or checked is None:
            raise RulesError(own + in_bases)
        loaded = _Loaded(source, checked, _with_origins(source, checked), tuple(bases))
        _check_ids(loaded)
        return loaded

    def _base(self, source: Source, base: str, index: int, path: Path, chain: tuple[Path, ...]) -> _Loaded:
        target, name, problem = _target(source.file, base, path.parent)
        if not problem and self.count >= MOST_FILES:
            problem = f"more than {MOST_FILES} files extend one another"
        if not problem and target.resolve() in chain:
            problem = f"{shown(base)} extends itself: {' > '.join(step.name for step in [*chain, target])}"
        if problem:
            code = "PP107" if base in NOT_YET_PRESETS else "PP109"
            raise RulesError([source.problem(code, problem, *source.place(("extends", index)).value)])
        return self.file(target, name, chain)


def _target(file: str, base: str, folder: Path) -> tuple[Path, str, str]:
    """What extends names: the file, its name as shown to people, and what is wrong with it, if anything."""
    if not is_path(base):
        try:
            found = presets.find(base)
        except RulesError as error:
            return folder, "", error.problems[0].message
        return found, found.name, ""
    name = os.path.normpath(os.path.join(os.path.dirname(file), base))
    if os.path.isabs(base) or not base.endswith(SUFFIXES):
        return folder, name, f"extends takes a preset or a relative path that ends in .yaml, not {shown(base)}"
    try:
        if not (folder / base).is_file():
            return folder, name, f"extends names the file {shown(base)}, which does not exist"
    except (OSError, ValueError):
        return folder, name, f"extends names the file {shown(base)}, which cannot be looked up"
    return folder / base, name, ""


def _extends(source: Source) -> list[str]:
    """What the file extends, also where something else in it is wrong."""
    written = source.data.get("extends", []) if isinstance(source.data, dict) else []
    bases = written if isinstance(written, list) else [written]
    return [base for base in bases if isinstance(base, str)]


def _content(path: Path, name: str) -> bytes:
    """The bytes of a plain file, one more than allowed at most, so that a large file is refused unread."""
    reason = "it does not exist"
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(LARGEST_FILE + 1)
        reason = "it is not a plain file" if path.exists() else reason
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "its name cannot be used"
    raise RulesError([RulesProblem("PP100", f"the file {shown(str(path))} cannot be read: {reason}")])


def _checked(source: Source) -> RulesFile | None:
    """The file against the models; findings become problems with a place."""
    try:
        return RulesFile.model_validate(source.data, context=FROM_A_FILE)
    except ValidationError as error:
        for finding in islice(findings_of(error, RulesFile, source.data), MOST_PROBLEMS):
            if not _already_said(source, finding):
                source.problems.append(_placed(source, finding))
        return None


def _already_said(source: Source, finding: Finding) -> bool:
    """A value that could not be read is neither wrong nor missing once more."""
    if finding.code != "PP106":
        return finding.path in source.unusable
    return any(path[: len(finding.path)] == finding.path for path in source.unusable)


def _placed(source: Source, finding: Finding) -> RulesProblem:
    place = source.place(finding.path)
    line, column = place.key if finding.at_key else place.value
    if finding.offset is not None:
        line, column = _inside(source, finding, line, column)
    return source.problem(finding.code, finding.message, line, column)


def _inside(source: Source, finding: Finding, line: int, column: int) -> tuple[int, int]:
    """The place of an offset within a text written on one line; else where the text begins."""
    text = source.data
    for part in finding.path:
        text = text[part]
    start = source.lines[line - 1].find(text, column - 1)
    return (line, start + 1 + (finding.offset or 0)) if start >= 0 else (line, column)


def _with_origins(source: Source, file: RulesFile) -> tuple[Rule, ...]:
    """The rules of the file, each with its place, the lines of its settings and the places in its match."""
    lines: dict[int, dict[str, int]] = {index: {} for index in range(len(file.rules))}
    keys: dict[int, dict[str, tuple[int, int]]] = {index: {} for index in range(len(file.rules))}
    for path, place in source.places.items():
        match path:
            case ("rules", int(index), "apply", str(setting)):
                lines[index][setting] = place.key[0]
            case ("rules", int(index), "match", str(key)):
                keys[index][key] = place.value
    return tuple(
        rule.at(Origin(source.file, line, lines[index], column, keys[index]))
        for index, rule in enumerate(file.rules)
        for line, column in [source.place(("rules", index)).value]
    )


def _check_ids(loaded: _Loaded) -> None:
    """One id, one rule; a file's own rule may replace one it extends; expect names rules that exist."""
    problems = []
    own: set[str] = set()
    for index, rule in enumerate(loaded.rules):
        if rule.id in own:
            place = loaded.source.place(("rules", index, "id")).value
            problems.append(loaded.source.problem("PP110", f'two rules have the id "{rule.id}"', *place))
        own.add(rule.id)
    from_bases: dict[str, Rule] = {}
    for index, base in enumerate(loaded.bases):
        for rule in _rules(base):
            other = from_bases.setdefault(rule.id, rule)
            if rule.id not in own and (other.match, other.apply) != (rule.match, rule.apply):
                place = loaded.source.place(("extends", index)).value
                message = f'{other.origin.file} and {rule.origin.file} both have a rule "{rule.id}"; write it here'
                problems.append(loaded.source.problem("PP110", message, *place))
    known = own | set(from_bases)
    for index, expect in enumerate(loaded.file.expect):
        if expect.rule is not None and expect.rule not in known:
            place = loaded.source.place(("expect", index, "rule")).value
            near = did_you_mean(expect.rule, known)
            message = f'expect names the rule "{expect.rule}", which does not exist{"; " + near if near else ""}'
            problems.append(loaded.source.problem("PP115", message, *place))
    if len(known) > MOST_RULES:
        problems.append(RulesProblem("PP104", f"more than {MOST_RULES} rules", loaded.source.file))
    if problems:
        raise RulesError(problems)


def _rules(loaded: _Loaded) -> tuple[Rule, ...]:
    """Own rules first, then those of each base that are not replaced."""
    merged = {rule.id: rule for rule in loaded.rules}
    for base in loaded.bases:
        for rule in _rules(base):
            merged.setdefault(rule.id, rule)
    return tuple(merged.values())


def _merged(loaded: _Loaded, name: str) -> RuleSet:
    files = list(_files(loaded))
    expect = tuple(dict.fromkeys(one for file in files for one in file.expect))
    return RuleSet(
        name=name,
        rules=_rules(loaded),
        expect=expect,
        on_unmatched=_first([file.on_unmatched for file in files]),
        on_refused=_first([file.on_refused for file in files]),
        on_unexpected=_first([file.on_unexpected for file in files]),
    )


def _first(choices: list[OnTrouble | None]) -> OnTrouble:
    """What the strongest file says that says anything."""
    for choice in choices:
        if choice is not None:
            return choice
    return "warn"


def _files(loaded: _Loaded) -> list[RulesFile]:
    return [loaded.file, *(file for base in loaded.bases for file in _files(base))]
