"""What changed between two reviews: by site, by rule, in the rules, in the graphs."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from precisionpass.review.folding import fold_names
from precisionpass.review.html import RESOLVED, changes, render
from precisionpass.review.plain import plain, shown
from precisionpass.review.report import NearMissRecord, Report, SiteRecord
from precisionpass.review.text import value_words, wrapped

# Where a site stands: told, but no change of what is computed.
PLACES = ("source", "graph", "module_class")
LONGEST_DIFF = 400
NEAR_MISS = " (near miss)"  # after the kind

Key = tuple[str, str, str, int]  # site or near miss, kind, module, which of that kind in that module
Change = tuple[str, str, str]  # what, in A, in B


@dataclass(frozen=True)
class Changed:
    """Sites, or near misses, that changed in the same way. how: added | removed | changed | moved."""

    how: str
    kind: str
    modules: tuple[str, ...]
    count: int
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Comparison:
    """Two reviews, A and B. rules: (rule, sites in A, sites in B) where they differ.

    resolved: the lines of a unified diff of the rules. graphs: (file, lines added, lines removed).
    notes: what else differs.
    """

    sites: tuple[Changed, ...]
    rules: tuple[tuple[str, int, int], ...]
    resolved: tuple[str, ...]
    graphs: tuple[tuple[str, int, int], ...]
    notes: tuple[Change, ...]

    @property
    def differs(self) -> bool:
        """Whether anything but the place of code differs: lines of source that have moved do not count."""
        sites = any(site.how != "moved" for site in self.sites)
        return sites or bool(self.rules or self.resolved or self.notes)

    @property
    def verdict(self) -> str:
        """One sentence."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for site in self.sites:
            words = ("near miss", "near misses") if site.kind.endswith(NEAR_MISS) else ("site", "sites")
            counts[site.how, *words] += site.count
        parts = [f"{count} {one if count == 1 else more} {how}" for (how, one, more), count in sorted(counts.items())]
        parts += ["the rules differ"] if self.resolved or any(note[0] == "rules" for note in self.notes) else []
        if not self.differs:
            return "The two reviews say the same" + (f" ({', '.join(parts)})." if parts else ".")
        return (", ".join(parts) or "The two reviews differ") + "."

    def text(self, width: int = 100) -> str:
        """The comparison as text of at most `width` columns."""
        lines = [*wrapped(self.verdict, width)]
        for note in self.notes:
            lines += wrapped(_words(note), width, "    ")
        for site in self.sites:
            names = ", ".join(shown(name) or "(the model itself)" for name in site.modules)
            lines += ["", *wrapped(f"{shown(site.kind)} x {site.count}  {site.how}  {names}", width)]
            for change in site.changes:
                lines += wrapped(_words(change), width, "    ")
        lines += ["", "Sites by rule"] if self.rules else []
        for rule, before, after in self.rules:
            lines += wrapped(f"{shown(rule)}: {before} -> {after}", width, "    ")
        lines += ["", "Rules", *(f"    {shown(line, width - 4)}" for line in self.resolved)] if self.resolved else []
        lines += ["", "Graphs"] if self.graphs else []
        for name, added, removed in self.graphs:
            lines += wrapped(f"{shown(name)}: {added} lines added, {removed} removed", width, "    ")
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """The comparison as one HTML document that needs no network and no script."""
        return render("diff.html.j2", comparison=self, resolved=changes(self.resolved))


def compare(a: Report, b: Report) -> Comparison:
    """What is different in review B from review A."""
    return Comparison(
        sites=tuple(_folded(_changes(_keyed(a), _keyed(b)))),
        rules=tuple(_by_rule(a, b)),
        resolved=tuple(_cut(_lines(a.artifacts.get(RESOLVED, ""), b.artifacts.get(RESOLVED, "")))),
        graphs=tuple(_graphs(a.artifacts, b.artifacts)),
        notes=tuple(_notes(a, b)),
    )


def _keyed(report: Report) -> dict[Key, SiteRecord | NearMissRecord]:
    """Every site and near miss by what stays the same when a library is updated."""
    seen: Counter[tuple[str, str, str]] = Counter()
    keyed: dict[Key, SiteRecord | NearMissRecord] = {}
    for record in (*report.sites, *report.near_misses):
        own = ("site" if isinstance(record, SiteRecord) else "near miss", record.kind, record.module)
        keyed[*own, seen[own]] = record
        seen[own] += 1
    return keyed


def _changes(
    a: Mapping[Key, SiteRecord | NearMissRecord], b: Mapping[Key, SiteRecord | NearMissRecord]
) -> Iterable[tuple[str, str, SiteRecord | NearMissRecord, tuple[Change, ...]]]:
    """(how, kind, record, changes) for every key that is not the same in both."""
    for key in dict.fromkeys((*a, *b)):
        was, now = a.get(key), b.get(key)
        kind = key[1] if key[0] == "site" else key[1] + NEAR_MISS
        if was is None or now is None:
            record = was or now
            assert record is not None
            yield "removed" if now is None else "added", kind, record, tuple(_account(record, removed=now is None))
            continue
        found = tuple(_differences(was, now))
        if found:
            moved = all(what in PLACES for what, _, _ in found)
            yield "moved" if moved else "changed", kind, now, found


def _account(record: SiteRecord | NearMissRecord, removed: bool) -> Iterable[Change]:
    """What a record that only one side has says of itself."""
    names = ("decision", "rule", "reason", "formula", "source") if isinstance(record, SiteRecord) else ("reason",)
    for name in names:
        value = str(getattr(record, name))
        if value:
            yield (name, value, "") if removed else (name, "", value)


def _differences(was: SiteRecord | NearMissRecord, now: SiteRecord | NearMissRecord) -> Iterable[Change]:
    before, after = (plain(record) for record in (was, now))
    assert isinstance(before, dict) and isinstance(after, dict)
    for name in before:
        old, new = before[name], after[name]
        if old == new or name == "message":
            continue
        if not isinstance(old, dict):
            first, second = (", ".join(one) if isinstance(one, list) else value_words(one) for one in (old, new))
            yield name, first, second
            continue
        for one in dict.fromkeys((*old, *new)):
            first, second = (_one(name, held.get(one)) for held in (old, new))
            if first != second:
                yield one, first, second


def _one(field: str, held: object) -> str:
    """A fact, or a setting with the rule that set it; the line of the rule is its place, and does not count."""
    if held is None:
        return ""
    if field == "measured" and isinstance(held, dict):
        return " -> ".join(f"{held[name]:.1e}" for name in ("old_error", "new_error"))
    if field == "settings" and isinstance(held, dict):
        return f"{value_words(held.get('value'))} (rule {value_words(held.get('rule'))})"
    return value_words(held)


def _folded(found: Iterable[tuple[str, str, SiteRecord | NearMissRecord, tuple[Change, ...]]]) -> list[Changed]:
    """Those that changed in the same way, together; what has only moved comes last."""
    alike: dict[str, list] = {}
    for how, kind, record, changed in found:
        alike.setdefault(json.dumps([how, kind, changed]), []).append((how, kind, record, changed))
    groups = [
        Changed(
            how, kind, fold_names(dict.fromkeys(one[2].module for one in members)),
            sum(getattr(one[2], "count", 1) for one in members), changed,
        )
        for members in alike.values()
        for how, kind, _, changed in members[:1]
    ]  # fmt: skip
    return sorted(groups, key=lambda group: group.how == "moved")


def _by_rule(a: Report, b: Report) -> Iterable[tuple[str, int, int]]:
    was, now = (_counts(report) for report in (a, b))
    for rule in dict.fromkeys((*was, *now)):
        if was[rule] != now[rule]:
            yield rule, was[rule], now[rule]


def _counts(report: Report) -> Counter[str]:
    counts: Counter[str] = Counter()
    for site in report.sites:
        counts.update(dict.fromkeys({str(one.get("rule", "")) for one in site.settings.values()}, site.count))
    return Counter({rule: counts[rule] for rule in sorted(counts)})


def _lines(old: str, new: str) -> list[str]:
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), "A", "B", lineterm="", n=2))


def _cut(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LONGEST_DIFF else [*lines[:LONGEST_DIFF], f"... {len(lines) - LONGEST_DIFF} more"]


def _graphs(a: Mapping[str, str], b: Mapping[str, str]) -> Iterable[tuple[str, int, int]]:
    for name in sorted({*a, *b} - {RESOLVED}):
        if name.endswith(".py") and name.startswith("graph_") and a.get(name) != b.get(name):
            lines = _lines(a.get(name, ""), b.get(name, ""))[2:]
            yield name, sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def _notes(a: Report, b: Report) -> Iterable[Change]:
    if a.rules_digest != b.rules_digest:
        yield "rules", f"{a.rules_name} ({a.rules_digest[:12]})", f"{b.rules_name} ({b.rules_digest[:12]})"
    for what, was, now in (
        ("graphs", a.graphs, b.graphs),
        ("events", Counter(a.events), Counter(b.events)),
        ("failed expectations", a.failed_expectations, b.failed_expectations),
    ):
        if was != now:
            yield what, _listed(was), _listed(now)


def _listed(held: object) -> str:
    if isinstance(held, Counter):
        return "; ".join(f"{text} (x {count})" if count > 1 else text for text, count in held.items())
    return "; ".join(held) if isinstance(held, tuple) else str(held)


def _words(change: Change) -> str:
    what, was, now = (shown(part, 300) for part in change)
    return f"{what}: {was or '(nothing)'} -> {now or '(nothing)'}"
