"""From decisions to the report: a by-product of what was decided, never a second analysis."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from precisionpass.capture import Captured
from precisionpass.decide import Decision
from precisionpass.origin import Origin
from precisionpass.review.code import View, file_of
from precisionpass.review.files import safe_name
from precisionpass.review.folding import group_records
from precisionpass.review.report import NearMissRecord, Report, SiteRecord
from precisionpass.review.repro import repro
from precisionpass.review.slices import Piece, after, before, site_calls
from precisionpass.rewriting import Placed
from precisionpass.rules import RuleSet
from precisionpass.shadow import Shadow
from precisionpass.sites.site import NearMiss, Site

log = logging.getLogger("precisionpass")


@dataclass(frozen=True)
class Place:
    """Where a site is in the captured graph, by the names of its calls: all of them, and those that others read."""

    interior: frozenset[str]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class GraphResult:
    """What came of one captured graph. old: the graph before the rewrite, None where it was not looked into.

    places: of each decision. placed: position of a rewritten decision -> what took the place of its results.
    """

    captured: Captured
    old: fx.Graph | None = None
    decisions: tuple[Decision, ...] = ()
    places: tuple[Place, ...] = ()
    placed: Mapping[int, Placed] = field(default_factory=dict)
    near_misses: tuple[tuple[NearMiss, Origin], ...] = ()
    events: tuple[str, ...] = ()


def place_of(site: Site, shadow: Shadow) -> Place:
    """The site's place, to be asked before the rewrite."""

    def name(node: fx.Node) -> str:
        captured = shadow.source.get(node) or shadow.owner.get(node)
        return captured.name if captured is not None else ""

    return Place(frozenset(filter(None, map(name, site.interior))), (name(site.output),))


def report_of(results: Sequence[GraphResult], rules: RuleSet, nodes: int) -> Report:
    """One report of a captured graph with its child graphs, which come after it in `results`."""
    decisions = [decision for result in results for decision in result.decisions]
    fired = {rule for decision in decisions for rule in decision.rules}
    sites: list[SiteRecord] = []
    artifacts: dict[str, str] = {}
    events = [event for result in results for event in result.events]
    for result in results:
        records = tuple(map(_site_record, result.decisions))
        try:
            drawn, files = _with_calls(result, records)
            files |= _code(result, results)
        except Exception as problem:
            log.warning("the code of graph %s could not be written", result.captured.name, exc_info=problem)
            events.append(f"the code of graph {result.captured.name} could not be written: {type(problem).__name__}")
            drawn, files = records, {}
        sites += drawn
        artifacts |= files
    return Report(
        sites=tuple(sites),
        near_misses=tuple(
            _near_miss_record(miss, origin, result.captured.name)
            for result in results
            for miss, origin in result.near_misses
        ),
        rules_name=rules.name,
        rules_digest=rules.digest,
        unused_rules=tuple(rule.id for rule in rules.rules if rule.enabled and rule.id not in fired),
        events=tuple(events),
        graphs=1,
        nodes=nodes,
        artifacts=artifacts,
    )


def _site_record(decision: Decision) -> SiteRecord:
    site = decision.site
    return SiteRecord(
        kind=site.kind,
        module=decision.origin.module,
        module_class=decision.origin.module_class,
        source=decision.origin.source,
        graph=decision.graph,
        decision=decision.action,
        rule=decision.rule,
        settings={
            name: {"value": setting.value, "rule": setting.rule, "file": setting.file, "line": setting.line}
            for name, setting in decision.settings.items()
        },
        reason=decision.reason,
        message="; ".join((decision.message, *site.notes)),
        facts={name: _plain(value) for name, value in site.facts.items()},
        formula=site.formula,
        holds_while=decision.holds_while,
        rules=decision.rules,
    )


def _near_miss_record(miss: NearMiss, origin: Origin, graph: str) -> NearMissRecord:
    return NearMissRecord(
        miss.kind, origin.module, origin.module_class, origin.source, graph, miss.reason, miss.message
    )


def _plain(value: object) -> int | float | bool | str:
    if isinstance(value, bool | int | float | str):
        return value
    return int(value) if getattr(value, "is_Integer", False) else str(value)  # type: ignore[call-overload]


def _with_calls(result: GraphResult, records: Sequence[SiteRecord]) -> tuple[list[SiteRecord], dict[str, str]]:
    """The records, the first of each group of equal ones with its calls, and the repro files of those rewritten."""
    drawn, files = list(records), {}
    firsts = {id(group.record) for group in group_records(records)}
    for position, record in enumerate(records):
        if id(record) not in firsts or result.old is None:
            continue
        old, new = _pieces(result, position)
        if old is None:
            continue
        calls = site_calls(old, new, result.places[position].interior)
        text = repro(record, result.old, old, new) if new is not None else ""
        if text:
            name = _free(f"repro_{record.graph}.{record.module or 'model'}", files)
            files[name] = text
            calls = replace(calls, repro=name)
        drawn[position] = replace(record, calls=calls)
    return drawn, files


def _pieces(result: GraphResult, position: int) -> tuple[Piece | None, Piece | None]:
    """The site's part of the graph before and, where it was rewritten, after."""
    assert result.old is not None
    place, placed = result.places[position], result.placed.get(position)
    if placed is None:
        return before(result.old, place.outputs, place.interior, ()), None
    old_names = {node.name for node in result.old.nodes}
    new = after(result.captured.module.graph, tuple(placed.values()), old_names)
    return before(result.old, tuple(placed), place.interior, {node.name for node in new.inputs}), new


def _free(name: str, taken: Mapping[str, str]) -> str:
    """A plain file name ending in .py that is not taken yet."""
    candidate, number = safe_name(f"{name}.py"), 1
    while candidate in taken:
        number += 1
        candidate = safe_name(f"{name}.{number}.py")
    return candidate


def _code(result: GraphResult, results: Sequence[GraphResult]) -> dict[str, str]:
    """The graph before and after, as files, and their difference."""
    if not any(one.old is not None for one in results if _is_within(one.captured.name, result.captured.name)):
        return {}
    name = f"graph_{result.captured.name}"
    was, now = (file_of(_view(result, results, moment), moment) for moment in ("before", "after"))
    old_lines, new_lines = (text.splitlines(keepends=True) for text in (was, now))
    diff = "".join(difflib.unified_diff(old_lines, new_lines, f"{name}.before.py", f"{name}.after.py"))
    return {f"{name}.before.py": was, f"{name}.after.py": now, f"{name}.diff": diff}


def _is_within(graph: str, other: str) -> bool:
    """Whether a graph is the other one or a child of it, by their names."""
    return graph == other or graph.startswith(f"{other}.")


def _view(result: GraphResult, results: Sequence[GraphResult], moment: str) -> View:
    """The graph at a moment, its children at the same one."""
    module = result.captured.module
    children = {
        name: _view(one, results, moment)
        for name, child in module.named_children()
        for one in results
        if one.captured.module is child
    }
    return View(result.captured, result.old if moment == "before" and result.old else module.graph, children)
