"""The review as one page that needs no network and no script."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from precisionpass.review import text
from precisionpass.review.folding import group_records
from precisionpass.review.plain import shown

if TYPE_CHECKING:
    from precisionpass.review.report import Report

LONGEST_DIFF = 4000  # lines of one graph's diff on the page; the file beside it has all of them
LONGEST_LINE = 400


def page(report: Report) -> str:
    """The report as one HTML document with its style and script inside it. The same report gives the same text."""
    folder = files("precisionpass.review")
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": shown, "words": text.words, "value": text.value_words}
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    sites = group_records(report.sites)
    return template.render(
        report=report,
        verdict=text.verdict(report),
        scope=text.scope(report),
        sections=[
            (decision, [group for group in sites if group.record.decision == decision])
            for decision in _decisions(sites)
        ],
        misses=group_records(report.near_misses),
        events=text.counted(report.events),
        diffs=_diffs(report),
        style=Markup(style),  # as it is, as is the script: both are files of this package
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _decisions(groups) -> list[str]:
    return sorted({group.record.decision for group in groups}, key=text.rank)


def _diffs(report: Report) -> list[tuple[str, list[tuple[str, str]], int]]:
    """(file name, [(added | removed | same, line)], lines left out) for every graph's diff."""
    diffs = []
    for name in sorted(report.artifacts):
        if not name.endswith(".diff"):
            continue
        lines = report.artifacts[name].splitlines()
        rows = [(_change(line), shown(line, LONGEST_LINE)) for line in lines[:LONGEST_DIFF]]
        diffs.append((shown(name), rows, max(0, len(lines) - LONGEST_DIFF)))
    return diffs


def _change(line: str) -> str:
    if line.startswith("+") and not line.startswith("+++"):
        return "added"
    return "removed" if line.startswith("-") and not line.startswith("---") else "same"
