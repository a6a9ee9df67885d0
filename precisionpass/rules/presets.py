"""The rules files that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from precisionpass.errors import RulesError, RulesProblem
from precisionpass.rules.nearest import did_you_mean, or_list, shown
from precisionpass.rules.not_yet import NOT_YET_PRESETS

SUFFIX = ".yaml"
_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the files lie inside the package; in a checkout, in rules/ beside it.
FOLDERS = (_PACKAGE / "presets", _PACKAGE.parent / "rules")


def folder() -> Path:
    """Where the presets lie."""
    return next((place for place in FOLDERS if (place / f"off{SUFFIX}").is_file()), FOLDERS[0])


def names() -> tuple[str, ...]:
    """All presets, sorted, those that are not in this version among them."""
    return tuple(sorted(path.stem for path in folder().glob(f"*{SUFFIX}")))


def find(name: str) -> Path:
    """The file of a preset to load. Raises RulesError where there is no such preset, or not in this version."""
    path = _file(name)
    if name in NOT_YET_PRESETS:
        message = f"the preset {shown(name)} is not in this version: {NOT_YET_PRESETS[name]}"
        raise RulesError([RulesProblem("PP107", message)])
    return path


def text(name: str) -> str:
    """A preset as it is written, comments included."""
    return _file(name).read_text(encoding="utf-8")


def summary(name: str) -> str:
    """The sentence after the preset's name in its first comment; whether the preset is not in this version."""
    first = next(line for line in text(name).splitlines() if line.startswith(f"# {name}: "))
    note = f" (not in this version: {NOT_YET_PRESETS[name]})" if name in NOT_YET_PRESETS else ""
    return first.removeprefix(f"# {name}: ") + note


def _file(name: str) -> Path:
    known = names()
    if name in known:
        return folder() / f"{name}{SUFFIX}"
    usable = [one for one in known if one not in NOT_YET_PRESETS]
    near = did_you_mean(name, known) or f"choose {or_list(usable)}, or a path that ends in .yaml"
    raise RulesError([RulesProblem("PP109", f"no preset is called {shown(name)}; {near}")])
