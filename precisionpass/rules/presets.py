"""The rules files that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".yaml"
_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the files lie inside the package; in a checkout, in rules/ beside it.
FOLDERS = (_PACKAGE / "presets", _PACKAGE.parent / "rules")


def folder() -> Path:
    """Where the presets lie."""
    return next((place for place in FOLDERS if (place / f"off{SUFFIX}").is_file()), FOLDERS[0])


def names() -> tuple[str, ...]:
    """All presets, sorted."""
    return tuple(sorted(path.stem for path in folder().glob(f"*{SUFFIX}")))


def find(name: str) -> Path | None:
    """The file of a preset; None: there is no such preset."""
    return folder() / f"{name}{SUFFIX}" if name in names() else None
