"""Write a review folder: all of it, or nothing of it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from precisionpass.errors import PrecisionPassError
from precisionpass.review.plain import shown

# Files of an older review's graphs and sites; removed when a newer review does not have them.
_GRAPH_FILE = re.compile(r"graph_[0-9][0-9.]*\.(before\.py|after\.py|diff)|repro_[0-9][0-9.]*\..*\.py")
_SUFFIXES = re.compile(r"(\.[a-z]{1,8}){0,2}$")


def write(folder: str | os.PathLike[str], content: Mapping[str, str], artifacts: Mapping[str, str]) -> None:
    """Write content and artifacts (file name -> text) into the folder, made if missing.

    The names in content are used as they are; those of artifacts are made safe. Raises PrecisionPassError where the
    folder cannot be written; what was there before is then still there.
    """
    place = Path(folder)
    named = dict(content) | {safe_name(name, taken=content): artifacts[name] for name in artifacts}
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write_then_move(place, named)
    except (OSError, ValueError) as error:
        raise _unwritten(place, error, 'a folder, for example review="review/",') from error


def write_file(file: str | os.PathLike[str], text: str) -> None:
    """Write one file, all of it or nothing of it. Raises PrecisionPassError where it cannot be written."""
    place = Path(file)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write_then_move(place.parent, {place.name: text}, sweep=False)
    except (OSError, ValueError) as error:
        raise _unwritten(place, error, "a file in a folder") from error


def safe_name(name: str, taken: Iterable[str] = ()) -> str:
    """A file name of at most 120 plain characters; two different names stay different.

    A name that had to be changed, or is taken, carries a digest of the original.
    """
    clean = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".-")
    if clean == name and 0 < len(name) <= 120 and name not in taken:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    suffixes = _SUFFIXES.search(clean)
    stem, suffix = (clean[: suffixes.start()], suffixes[0]) if suffixes else (clean, "")
    return f"{stem[:60] or 'file'}-{digest}{suffix}"


def _unwritten(place: Path, error: Exception, what: str) -> PrecisionPassError:
    return PrecisionPassError(
        "the review could not be written",
        where=shown(place),
        why=getattr(error, "strerror", None) or str(error),
        fix=f"name {what} that can be written and has room; the model and any older review are as they were",
        code="PP301",
    )


def _write_then_move(place: Path, named: Mapping[str, str], sweep: bool = True) -> None:
    """sweep: also remove what an older review left there."""
    staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=place))
    try:
        for name, text in named.items():
            (staging / name).write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        for name in named:
            os.replace(staging / name, place / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for old in place.iterdir() if sweep else ():
        if _GRAPH_FILE.fullmatch(old.name) and old.name not in named:
            old.unlink()
