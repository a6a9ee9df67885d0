"""From a preset's name, a file or a list of rules to a RuleSet, or every problem at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from precisionpass.errors import RulesError, RulesProblem
from precisionpass.rules import presets
from precisionpass.rules.model import MOST_RULES, Origin, Rule, RulesFile
from precisionpass.rules.nearest import did_you_mean, shown
from precisionpass.rules.problems import Finding, findings_of
from precisionpass.rules.ruleset import RuleSet
from precisionpass.rules.source import LARGEST_FILE, Source, decode, read

MOST_FILES = 32
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

    source: the name of a preset, a path that ends in .yaml or .yml, a list of Rule, or a RuleSet (returned as it is).
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
        bases = []
        for index, base in enumerate(_extends(source)):
            loaded = self._base(source, base, index, path, (*chain, path.resolve()))
            bases.extend([loaded] if loaded else [])
        if source.problems or checked is None:
            raise RulesError(sorted(source.problems, key=lambda problem: (problem.line, problem.column)))
        rules = tuple(rule.at(_origin(source, index)) for index, rule in enumerate(checked.rules))
        loaded = _Loaded(source, checked, rules, tuple(bases))
        _check_ids(loaded)
        return loaded

    def _base(self, source: Source, base: str, index: int, path: Path, chain: tuple[Path, ...]) -> _Loaded | None:
        place = source.place(("extends", index)).value

        def refuse(message: str) -> None:
            source.problems.append(source.problem("PP109", message, *place))

        if self.count >= MOST_FILES:
            return refuse(f"more than {MOST_FILES} files extend one another")
        if not is_path(base):
            try:
                target = presets.find(base)
            except RulesError as error:
                return refuse(error.problems[0].message)
            name = target.name
        else:
            if os.path.isabs(base) or not base.endswith(SUFFIXES):
                return refuse(f"extends takes a preset or a relative path that ends in .yaml, not {shown(base)}")
            target, name = path.parent / base, os.path.normpath(os.path.join(os.path.dirname(source.file), base))
        if target.resolve() in chain:
            return refuse(f"{shown(base)} extends itself: " + " > ".join(step.name for step in [*chain, target]))
        if not target.is_file():
            return refuse(f"extends names the file {shown(base)}, which does not exist")
        return self.file(target, name, chain)


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
        return RulesFile.model_validate(source.data)
    except ValidationError as error:
        for finding in findings_of(error, RulesFile, source.data):
            if finding.path not in source.unusable:
                source.problems.append(_placed(source, finding))
        return None


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


def _origin(source: Source, index: int) -> Origin:
    path = ("rules", index, "apply")
    lines = {str(key[3]): place.key[0] for key, place in source.places.items() if key[:3] == path and len(key) == 4}
    return Origin(source.file, source.place(("rules", index)).value[0], lines)


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
            if rule.id not in own and other.origin != rule.origin:
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
        on_unmatched=next((file.on_unmatched for file in files if file.on_unmatched), "warn"),
        on_refused=next((file.on_refused for file in files if file.on_refused), "warn"),
    )


def _files(loaded: _Loaded) -> list[RulesFile]:
    return [loaded.file, *(file for base in loaded.bases for file in _files(base))]
