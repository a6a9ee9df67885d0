"""The review as one page that needs no network and no script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from precisionpass.review import text
from precisionpass.review.advice import advice
from precisionpass.review.drawing import svg
from precisionpass.review.folding import Group, group_records
from precisionpass.review.plain import shown
from precisionpass.review.typeset import mathml

if TYPE_CHECKING:
    from precisionpass.review.report import Call, Report, SiteRecord

LONGEST_DIFF = 4000  # lines of one graph's diff on the page; the file beside it has all of them
LONGEST_LINE = 400
RESOLVED = "rules.resolved.yaml"


@dataclass(frozen=True)
class Entry:
    """A group of identical sites as the page shows it. formula, before, after: markup, "" where there is none."""

    group: Group[SiteRecord]
    formula: Markup
    before: Markup
    after: Markup
    old_code: tuple[str, ...]
    new_code: tuple[str, ...]
    repro: str


def page(report: Report) -> str:
    """The report as one HTML document with its style and script inside it. The same report gives the same text."""
    groups = group_records(report.sites)
    misses = group_records(report.near_misses)
    decisions = sorted({group.record.decision for group in groups}, key=text.rank)
    return render(
        "page.html.j2",
        report=report,
        verdict=re.sub(r"(\d) ", "\\1\u00a0", text.verdict(report)),  # a number stays with what it counts
        scope=text.scope(report),
        tiles=_tiles(report, decisions),
        sections=[(decision, [_entry(g) for g in groups if g.record.decision == decision]) for decision in decisions],
        kinds=list(dict.fromkeys(group.record.kind for group in [*groups, *misses])),
        misses=misses,
        rules=_rules(report),
        resolved=[shown(line, LONGEST_LINE) for line in report.artifacts.get(RESOLVED, "").splitlines()],
        expected="\nexpect:\n" in report.artifacts.get(RESOLVED, ""),
        events=text.counted(report.events),
        diffs=_diffs(report),
    )


def fragment(report: Report) -> str:
    """The folded table as a piece of HTML for a notebook: no style that could reach the page around it."""
    groups = sorted(group_records(report.sites), key=lambda group: text.rank(group.record.decision))
    return render(
        "fragment.html.j2",
        report=report,
        verdict=text.verdict(report),
        scope=text.scope(report),
        entries=[_entry(group) for group in groups[: text.GROUPS_SHOWN]],
        left_out=sum(group.count for group in groups[text.GROUPS_SHOWN :]),
        misses=group_records(report.near_misses)[: text.GROUPS_SHOWN],
    )


def render(template: str, **content: object) -> str:
    """A template of this package filled in. Whatever it is given is escaped unless it is Markup."""
    style, script = _file("page.css"), _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Both are files of this package: as they are.
    return _template(template).render(style=Markup(style), script=Markup(script), script_digest=digest, **content)


@cache
def _file(name: str) -> str:
    return (files("precisionpass.review") / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": shown, "words": text.words, "value": text.value_words, "advice": advice}
    return environment.from_string(_file(name))


def _entry(group: Group[SiteRecord]) -> Entry:
    site, calls = group.record, group.record.calls
    kind = shown(site.kind)
    before, after = (calls.before, calls.after) if calls else ((), ())
    return Entry(
        group=group,
        formula=Markup(mathml(site.formula)),
        before=Markup(svg(before, f"The calls of the {kind} site before")),
        after=Markup(svg(after, f"The calls of the {kind} site after", "new")),
        old_code=_code(before),
        new_code=_code(after),
        repro=shown(calls.repro) if calls else "",
    )


def _code(calls: Sequence[Call]) -> tuple[str, ...]:
    """The calls as lines of Python, each with what it gives."""
    return tuple(
        shown(f"{call.name} = {call.text}  # {call.type}" if call.text else f"# {call.name}: {call.type}", LONGEST_LINE)
        for call in calls
    )


def _tiles(report: Report, decisions: Sequence[str]) -> list[tuple[str, int, str]]:
    """(decision, how many sites, of which kinds), then the near misses."""
    tiles = []
    for decision in decisions:
        counts: Counter[str] = Counter()
        for site in report.sites:
            counts[site.kind] += site.count if site.decision == decision else 0
        tiles.append((decision, sum(counts.values()), _counted(counts)))
    missed = Counter(miss.kind for miss in report.near_misses)
    return [*tiles, *([("near miss" if len(report.near_misses) == 1 else "near misses", sum(missed.values()),
                       _counted(missed))] if missed else [])]  # fmt: skip


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{shown(kind)} {count}" for kind, count in counts.items() if count)


def _rules(report: Report) -> list[tuple[str, int]]:
    """Every rule that set anything, with the number of sites; then those that never fired, with 0."""
    fired: Counter[str] = Counter()
    for site in report.sites:
        for rule in dict.fromkeys(str(setting.get("rule", "")) for setting in site.settings.values()):
            fired[rule] += site.count
    return [*fired.items(), *((rule, 0) for rule in report.unused_rules)]


def _diffs(report: Report) -> list[tuple[str, list[tuple[str, str]], int]]:
    """(file name, [(added | removed | same, line)], lines left out) for every graph's diff."""
    diffs = []
    for name in sorted(report.artifacts):
        if name.endswith(".diff"):
            lines = report.artifacts[name].splitlines()
            diffs.append((shown(name), changes(lines[:LONGEST_DIFF]), max(0, len(lines) - LONGEST_DIFF)))
    return diffs


def changes(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(added | removed | same, line) for the lines of a unified diff."""
    return [(_change(line), shown(line, LONGEST_LINE)) for line in lines]


def _change(line: str) -> str:
    if line.startswith("+") and not line.startswith("+++"):
        return "added"
    return "removed" if line.startswith("-") and not line.startswith("---") else "same"
