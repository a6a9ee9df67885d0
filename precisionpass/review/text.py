"""The report as text: one verdict, then one row for every group of identical sites."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from precisionpass.review.advice import advice
from precisionpass.review.folding import Group, group_records
from precisionpass.review.plain import shown

if TYPE_CHECKING:
    from precisionpass.review.report import NearMissRecord, Report, SiteRecord

DECISIONS = ("rewritten", "refused", "kept")
GROUPS_SHOWN = 24  # of sites, and of near misses: what the screen leaves out, it counts
NAMES_SHOWN = 12
INDENT = "    "

Row = tuple[str, list[str], str, str]  # kind, names, decision, rule


def table(report: Report, width: int = 100) -> str:
    """The folded table that print(report) shows, at most `width` columns wide (never under 80)."""
    width = max(80, width)
    sites = sorted(group_records(report.sites), key=lambda group: rank(group.record.decision))
    misses = group_records(report.near_misses)
    rows = [_site_cells(group, report) for group in sites[:GROUPS_SHOWN]]
    miss_rows = [_miss_cells(group) for group in misses[:GROUPS_SHOWN]]
    lines = [*wrapped(verdict(report), width), *wrapped(scope(report), width)]
    for failure in report.failed_expectations:
        lines += wrapped(f"EXPECTATION FAILED: {shown(failure, 600)}", width)
    for group, row in zip(sites, _aligned(rows, width), strict=False):
        lines += ["", *row, *_site_details(group, report, width)]
    lines += _left_out(sites, "sites.jsonl")
    if misses:
        lines += ["", "Near misses: almost a site, left alone"]
    for group, row in zip(misses, _aligned(miss_rows, width), strict=False):
        lines += [*row, *_miss_details(group, width)]
    lines += _left_out(misses, "why_not.txt")
    lines += _closing(report, width)
    return "\n".join(lines) + "\n"


def why_not(report: Report, width: int = 100) -> str:
    """Everything that was found and not rewritten, with its reason; nothing left out."""
    sites = [group for group in group_records(report.sites) if group.record.decision != "rewritten"]
    sites.sort(key=lambda group: rank(group.record.decision))
    misses = group_records(report.near_misses)
    if not report.sites and not misses:
        return "No site was found, and nothing was almost a site.\n"
    if not sites and not misses:
        return "Every site that was found was rewritten, and nothing was almost a site.\n"
    lines: list[str] = []
    for group in sites:
        lines += [*_head(group, group.record.decision, width), *_reasons(group, width), *_places(group, width), ""]
    for group in misses:
        lines += [*_head(group, "near miss", width), *_reasons(group, width), *_places(group, width), ""]
    return "\n".join(lines)


def verdict(report: Report) -> str:
    """The first line: how many sites of each kind were rewritten, refused and kept, and how many were near misses."""
    near = len(report.near_misses)
    misses = [f"{near} near {'miss' if near == 1 else 'misses'}"] if near else []
    if not report.sites:
        return ", ".join(["No site was found", *misses]) + ": the model runs as it is."
    counts: Counter[tuple[str, str, str]] = Counter()
    for site in report.sites:
        why = "" if site.decision == "rewritten" else words(site.reason)
        counts[site.decision, site.kind, why] += site.count
    parts = [
        f"{count} {shown(kind)} {'site' if count == 1 else 'sites'} {shown(decision)}{f' ({why})' if why else ''}"
        for (decision, kind, why), count in sorted(counts.items(), key=lambda item: rank(item[0][0]))
    ]
    return ", ".join([*parts, *misses]) + "."


def words(reason: str) -> str:
    """A stable reason code as words: already_satisfied -> already satisfied."""
    return shown(reason.replace("_", " ").replace("-", " "))


def fact_words(facts: Mapping[str, object]) -> str:
    """Facts in one line: {"dtype": "bf16", "heads": 12, "causal": True} -> "bf16, heads 12, causal"."""
    parts = [shown(facts["dtype"])] if "dtype" in facts else []
    for name, value in facts.items():
        if name == "dtype" or value is False:
            continue
        parts.append(shown(name) if value is True else f"{shown(name)} {value_words(value)}")
    return ", ".join(parts)


def setting_words(settings: Mapping[str, Mapping[str, object]]) -> str:
    """Settings by the rule that set them: "implementation=auto, delta=residual (attention, stable-bf16.yaml:14,16)"."""
    by_rule: dict[tuple[str, str], list[tuple[str, Mapping[str, object]]]] = {}
    for name, setting in settings.items():
        key = (str(setting.get("rule", "")), PurePath(str(setting.get("file", ""))).name)
        by_rule.setdefault(key, []).append((name, setting))
    parts = []
    for (rule, file), held in by_rule.items():
        values = ", ".join(f"{shown(name)}={value_words(setting.get('value'))}" for name, setting in held)
        lines = ",".join(dict.fromkeys(str(setting["line"]) for _, setting in held if setting.get("line")))
        place = f"{shown(file)}:{lines}" if file and lines else shown(file)
        origin = ", ".join(part for part in (shown(rule), place) if part)
        parts.append(f"{values} ({origin})" if origin else values)
    return "; ".join(parts)


def measured_words(measured: Mapping[str, Mapping[str, float]]) -> str:
    """The figures in one line: the error of the output and the largest of a gradient, old and new."""
    gradients = [held for name, held in measured.items() if name != "output"]
    worst = max(gradients, key=lambda held: held["new_error"], default=None)
    parts = [("output", measured.get("output")), ("gradients", worst)]
    told = [f"{name} {held['old_error']:.1e} -> {held['new_error']:.1e}" for name, held in parts if held]
    return f"error against float64: {', '.join(told)}"


def _site_cells(group: Group[SiteRecord], report: Report) -> Row:
    site = group.record
    rule = f"{shown(report.rules_name, 60)}:{shown(site.rule, 60)}" if site.rule else words(site.reason)
    return f"{shown(site.kind, 40)} x {group.count}", _names(group), shown(site.decision, 40), rule


def _miss_cells(group: Group[NearMissRecord]) -> Row:
    return f"{shown(group.record.kind, 40)} x {group.count}", _names(group), words(group.record.reason), ""


def _site_details(group: Group[SiteRecord], report: Report, width: int) -> Iterator[str]:
    site = group.record
    if site.formula:
        yield from wrapped(shown(site.formula, 600), width, INDENT)
    facts = fact_words(site.facts)
    if facts:
        yield from wrapped(facts, width, INDENT)
    if site.settings:
        yield from wrapped("set: " + setting_words(site.settings), width, INDENT)
    if site.measured:
        yield from wrapped(measured_words(site.measured), width, INDENT)
    if site.message != site.decision:
        code = f" ({shown(site.reason)})" if site.rule and site.decision != "rewritten" else ""
        yield from wrapped(f"why: {shown(site.message, 600)}{code}", width, INDENT)
    if site.holds_while:
        yield from wrapped("holds while " + shown(site.holds_while, 600), width, INDENT)
    graphs = f" (graph {shown(group.graphs)})" if report.graphs > 1 else ""
    if group.sources or graphs:
        yield from wrapped(f"at {shown(group.sources, 300)}{graphs}", width, INDENT)


def _miss_details(group: Group[NearMissRecord], width: int) -> list[str]:
    why = shown(group.record.message, 600)
    place = f" (at {shown(group.sources, 300)})" if group.sources else ""
    return wrapped(why + place, width, INDENT)


def _head(group: Group, decision: str, width: int) -> list[str]:
    names = ", ".join(_pattern(name) for name in group.names)
    return wrapped(f"{shown(group.record.kind)} x {group.count}  {shown(decision)}  {names}", width)


def _reasons(group: Group, width: int) -> list[str]:
    lines = wrapped(f"{shown(group.record.reason)}: {shown(group.record.message, 2000)}", width, INDENT)
    todo = advice(group.record.reason)
    return [*lines, *(wrapped(f"to have it rewritten: {todo}", width, INDENT) if todo else [])]


def _places(group: Group, width: int) -> list[str]:
    inside = f" in {shown(group.record.module_class)}" if group.record.module_class else ""
    source = shown(group.sources, 2000) or "(no source)"
    return wrapped(f"at {source}{inside}, graph {shown(group.graphs)}", width, INDENT)


def _closing(report: Report, width: int) -> list[str]:
    lines: list[str] = []
    if report.unused_rules:
        lines += wrapped("Rules that never fired: " + ", ".join(shown(rule) for rule in report.unused_rules), width)
    for event, count in counted(report.events):
        lines += wrapped(f"Event: {shown(event, 600)}{f' (x {count})' if count > 1 else ''}", width)
    return ["", *lines] if lines else []


def scope(report: Report) -> str:
    """The second line: under which rules, and how much was looked at."""
    digest = f" ({shown(report.rules_digest[:12])})" if report.rules_digest else ""
    graphs = f"{report.graphs} {'graph' if report.graphs == 1 else 'graphs'}"
    return f"rules {shown(report.rules_name) or '(none)'}{digest}; {graphs}, {report.nodes} nodes"


def _left_out(groups: Sequence[Group], file: str) -> list[str]:
    hidden = sum(group.count for group in groups[GROUPS_SHOWN:])
    return ["", f"... and {hidden} more; report.save(folder) writes all of them to {file}"] if hidden else []


def _names(group: Group) -> list[str]:
    names = [_pattern(name) for name in group.names[:NAMES_SHOWN]]
    hidden = len(group.names) - len(names)
    return [*names, f"... ({hidden} more)"] if hidden else names


def _pattern(name: str) -> str:
    return shown(name) or "(the model itself)"


def value_words(value: object) -> str:
    """A fact or setting as a short text; floats with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def counted(events: Iterable[str]) -> list[tuple[str, int]]:
    """Every event once, with how often it happened, in the order in which each first did."""
    return list(Counter(events).items())


def rank(decision: str) -> int:
    """Where a decision stands in a review: what was changed first, what was left alone last."""
    return DECISIONS.index(decision) if decision in DECISIONS else len(DECISIONS)


def _aligned(rows: Sequence[Row], width: int) -> list[list[str]]:
    """Rows of kind, names, decision and rule in columns; the names take what is left and continue on further lines."""
    if not rows:
        return []
    kind, decision, rule = (max(len(row[column]) for row in rows) for column in (0, 2, 3))
    longest = max(len(", ".join(row[1])) for row in rows)
    room = max(24, min(longest, width - kind - decision - rule - 6))
    aligned = []
    for row in rows:
        first, *more = _filled(row[1], room)
        line = f"{row[0]:<{kind}}  {first:<{room}}  {row[2]:<{decision}}  {row[3]}".rstrip()
        aligned.append([*_split(line, width), *(" " * (kind + 2) + name for name in more)])
    return aligned


def _filled(names: Sequence[str], room: int) -> list[str]:
    """Names in lines of at most `room` columns; a name is broken only where it alone is longer, behind a dot or _."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + 2 + len(name) <= room:
            lines[-1] += f", {name}"
        else:
            lines += _broken(name, room)
    return lines[1:]


def _broken(name: str, room: int) -> Iterator[str]:
    while len(name) > room:
        end = max(name.rfind(".", 0, room), name.rfind("_", 0, room)) + 1
        end = end if end > room // 2 else room
        yield name[:end]
        name = name[end:]
    yield name


def _split(line: str, width: int) -> Iterable[str]:
    """The line as it is, or folded where a hostile cell makes it too long."""
    return [line] if len(line) <= width else textwrap.wrap(line, width, subsequent_indent=INDENT)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """The text in lines of at most `width` columns, further ones indented by two more."""
    more = indent + "  "
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=more, break_on_hyphens=False)
