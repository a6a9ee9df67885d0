"""The report: what was found, decided and why, as plain data.

It holds no times and no addresses: the same model and rules give the same report, so that a team can commit it and
read its changes as a diff.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from precisionpass.review import files, full, html, text
from precisionpass.review.folding import likeness
from precisionpass.review.plain import plain

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Call:
    """One call of a captured graph. text: the call as Python, "" for what comes from elsewhere. type: bf16[2, 12, 64].

    reads: names of what it reads. label, details: the call in a few words, and its settings, as a drawing shows them.
    """

    name: str
    text: str
    type: str
    reads: tuple[str, ...] = ()
    label: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calls:
    """The calls of a site before and, where it was rewritten, after; each in order, what they read first.

    repro: the file that runs the site alone, "" if none.
    """

    before: tuple[Call, ...]
    after: tuple[Call, ...] = ()
    repro: str = ""


@dataclass(frozen=True)
class SiteRecord:
    """A place in the model that is attention, a softmax or a norm, and what was decided about it.

    module: exact dotted name ("" for the model itself). source: the user's file:line. graph: "0" for the first graph
    captured, "0.1" for its second child. rule: the id that decided, "" if none; rules: of all that match, strongest
    first. settings: those that count there, name -> {"value", "rule", "file", "line"}. reason: a stable code
    ("rewritten" for a rewritten site), message: the same in words. facts: name -> number, bool or text. formula: what
    the site computes. holds_while: the condition on sizes under which this record holds, "" if always. count: how many
    sites the record stands for. measured: tensor -> old_error, new_error, old_bias, new_bias, where asked for. calls:
    of one of several equal records, no part of its identity.
    """

    kind: str
    module: str
    module_class: str
    source: str
    graph: str
    decision: str
    rule: str = ""
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    facts: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    formula: str = ""
    holds_while: str = ""
    count: int = 1
    rules: tuple[str, ...] = ()
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    calls: Calls | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class NearMissRecord:
    """Almost a site, and why it is none. The fields are those of SiteRecord."""

    kind: str
    module: str
    module_class: str
    source: str
    graph: str
    reason: str
    message: str


@dataclass(frozen=True)
class Report:
    """What a person reads before trusting a rewrite. `print(report)` is one screen; `save` writes a folder.

    unused_rules: ids of rules that never fired. events: graph breaks, recompiles and fallbacks, in words.
    failed_expectations: what the rules file expected and did not get. graphs, nodes: how many were looked at.
    seconds: our own time. artifacts: file name -> text (graphs before and after) for `save`.
    seconds and artifacts are no part of the report's identity: not of ==, not of to_json.
    """

    sites: tuple[SiteRecord, ...] = ()
    near_misses: tuple[NearMissRecord, ...] = ()
    rules_name: str = ""
    rules_digest: str = ""
    unused_rules: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    failed_expectations: tuple[str, ...] = ()
    graphs: int = 0
    nodes: int = 0
    seconds: float = field(default=0.0, compare=False)
    artifacts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def to_json(self) -> str:
        """The report as JSON text, keys sorted, with its schema_version."""
        content = plain(self)
        assert isinstance(content, dict)
        return json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2, sort_keys=True) + "\n"

    def text(self, width: int = 100) -> str:
        """The report as a folded table of at most `width` columns."""
        return text.table(self, width)

    def only(self, wanted: Callable[[str], bool]) -> Report:
        """The report cut down to the modules that are wanted; a site without calls has those of one that is alike."""
        calls = {likeness(site): site.calls for site in self.sites if site.calls}
        sites = (site for site in self.sites if wanted(site.module))
        return replace(
            self,
            sites=tuple(replace(site, calls=site.calls or calls.get(likeness(site))) for site in sites),
            near_misses=tuple(miss for miss in self.near_misses if wanted(miss.module)),
        )

    def full_text(self, width: int = 100) -> str:
        """All that is known of every site and near miss, with what would have to change where one was left alone."""
        return full.in_full(self, width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The folded table in a notebook."""
        return html.fragment(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the review into a folder: index.html, summary.txt, sites.jsonl, why_not.txt, report.json, artifacts.

        Every file is written beside its place and then moved there, so that a failure leaves an older review whole.
        Files of an older review that this one does not have are removed. The same report gives the same bytes.
        Raises PrecisionPassError where the folder cannot be written.
        """
        rows = (json.dumps(plain(site), sort_keys=True) + "\n" for site in self.sites)
        content = {
            "summary.txt": text.table(self),
            "sites.jsonl": "".join(rows),
            "why_not.txt": text.why_not(self),
            "report.json": self.to_json(),
            "index.html": html.page(self),
        }
        files.write(folder, content, self.artifacts)

    @staticmethod
    def merge(reports: Iterable[Report]) -> Report:
        """One report of several graphs; graphs are numbered on in the order given.

        A rule counts as unused only if no report used it. Raises ValueError if the reports come from different rules.
        """
        parts = tuple(reports)
        if not parts:
            return Report()
        if len({part.rules_digest for part in parts}) > 1:
            raise ValueError("reports made under different rules cannot be merged: " + _names(parts))
        starts = [sum(part.graphs for part in parts[:position]) for position in range(len(parts))]
        numbered = [_renumbered(part, start) for part, start in zip(parts, starts, strict=True)]
        return replace(
            numbered[0],
            sites=tuple(chain.from_iterable(part.sites for part in numbered)),
            near_misses=tuple(chain.from_iterable(part.near_misses for part in numbered)),
            unused_rules=tuple(r for r in parts[0].unused_rules if all(r in part.unused_rules for part in parts)),
            events=tuple(chain.from_iterable(part.events for part in numbered)),
            failed_expectations=tuple(dict.fromkeys(chain.from_iterable(p.failed_expectations for p in numbered))),
            graphs=sum(part.graphs for part in numbered),
            nodes=sum(part.nodes for part in numbered),
            seconds=sum(part.seconds for part in numbered),
            artifacts=dict(chain.from_iterable(part.artifacts.items() for part in numbered)),
        )


def _renumbered(report: Report, start: int) -> Report:
    """The report with its graphs numbered from `start` on."""

    def moved(label: str) -> str:
        return re.sub(r"^(graph_|repro_)?([0-9]+)", lambda found: f"{found[1] or ''}{int(found[2]) + start}", label)

    return replace(
        report,
        sites=tuple(
            replace(
                site, graph=moved(site.graph), calls=site.calls and replace(site.calls, repro=moved(site.calls.repro))
            )
            for site in report.sites
        ),
        near_misses=tuple(replace(miss, graph=moved(miss.graph)) for miss in report.near_misses),
        artifacts={moved(name): content for name, content in report.artifacts.items()},
    )


def _names(reports: Iterable[Report]) -> str:
    return ", ".join(dict.fromkeys(report.rules_name or "(no name)" for report in reports))
