"""Sites in full: everything that is known of each, and what would have to change where one was left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from precisionpass.review.advice import advice
from precisionpass.review.folding import Group, group_records
from precisionpass.review.plain import shown
from precisionpass.review.text import value_words, wrapped

if TYPE_CHECKING:
    from precisionpass.review.report import Call, NearMissRecord, Report, SiteRecord

INDENT, DEEPER = "    ", "      "
LONGEST_CODE = 400
FIGURES = (("error", ".1e"), ("bias", "+.1e"))


def in_full(report: Report, width: int = 100) -> str:
    """Every group of sites and near misses of the report, nothing folded away but what is the same."""
    parts = [list(_site(group, width)) for group in group_records(report.sites)]
    parts += [list(_near_miss(group, width)) for group in group_records(report.near_misses)]
    return "\n".join("\n".join(lines) + "\n" for lines in parts)


def _site(group: Group[SiteRecord], width: int) -> Iterator[str]:
    site = group.record
    rule = f" by rule {shown(site.rule)}" if site.rule else ""
    yield from wrapped(f"{shown(site.kind)} x {group.count}  {shown(site.decision)}{rule}", width)
    yield from _modules(group, width)
    if site.formula:
        yield from wrapped(f"computes  {shown(site.formula, 2000)}", width, INDENT)
    if site.message != site.decision:
        yield from wrapped(f"why       {shown(site.message, 2000)} ({shown(site.reason)})", width, INDENT)
    if site.decision != "rewritten":
        yield from _advised(site.reason, width)
    if site.holds_while:
        yield from wrapped(f"holds while {shown(site.holds_while, 2000)}", width, INDENT)
    if site.facts:
        yield f"{INDENT}facts"
        yield from wrapped(", ".join(f"{shown(n)} {value_words(v)}" for n, v in site.facts.items()), width, DEEPER)
    if site.settings:
        yield f"{INDENT}settings"
    for name, held in site.settings.items():
        line = f":{shown(held['line'])}" if held.get("line") else ""
        origin = f"rule {shown(held.get('rule', ''))}, {shown(held.get('file', ''))}{line}"
        yield from wrapped(f"{shown(name)} = {value_words(held.get('value'))}  ({origin})", width, DEEPER)
    if site.measured:
        yield f"{INDENT}measured against float64: error, then bias"
    for tensor, held in site.measured.items():
        error, bias = (f"{held[f'old_{one}']:{form}} -> {held[f'new_{one}']:{form}}" for one, form in FIGURES)
        yield from wrapped(f"{shown(tensor)}  {error}  {bias}", width, DEEPER)
    if site.calls:
        yield from _code("before" if site.calls.after else "calls", site.calls.before)
        yield from _code("after", site.calls.after)


def _near_miss(group: Group[NearMissRecord], width: int) -> Iterator[str]:
    miss = group.record
    yield from wrapped(f"{shown(miss.kind)} x {group.count}  near miss", width)
    yield from _modules(group, width)
    yield from wrapped(f"why       {shown(miss.message, 2000)} ({shown(miss.reason)})", width, INDENT)
    yield from _advised(miss.reason, width)


def _modules(group: Group, width: int) -> Iterator[str]:
    names = ", ".join(shown(name) or "(the model itself)" for name in group.modules)
    inside = f" ({shown(group.record.module_class)})" if group.record.module_class else ""
    yield from wrapped(f"in        {names}{inside}", width, INDENT)
    if group.sources:
        yield from wrapped(f"at        {shown(group.sources, 2000)}, graph {shown(group.graphs)}", width, INDENT)


def _advised(reason: str, width: int) -> Iterator[str]:
    if advice(reason):
        yield from wrapped(f"to have it rewritten: {advice(reason)}", width, INDENT)


def _code(title: str, calls: Sequence[Call]) -> Iterator[str]:
    """Calls as lines of Python, one a line however long."""
    if calls:
        yield f"{INDENT}{title}"
    for call in calls:
        text = f"{call.name} = {call.text}  # {call.type}" if call.text else f"# {call.name}: {call.type}"
        yield DEEPER + shown(text, LONGEST_CODE)
