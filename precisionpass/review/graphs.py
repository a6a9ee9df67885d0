"""From decisions to the report: a by-product of what was decided, never a second analysis."""

import difflib
from dataclasses import dataclass

from precisionpass.capture import Origin
from precisionpass.decide import Decision
from precisionpass.review.report import NearMissRecord, Report, SiteRecord
from precisionpass.rules import RuleSet
from precisionpass.sites.site import NearMiss


@dataclass(frozen=True)
class GraphResult:
    """What came of one captured graph. `before`, `after`: its code, "" where it was not looked into."""

    name: str
    decisions: tuple[Decision, ...] = ()
    near_misses: tuple[tuple[NearMiss, Origin], ...] = ()
    events: tuple[str, ...] = ()
    before: str = ""
    after: str = ""


def report_of(results: tuple[GraphResult, ...], rules: RuleSet, nodes: int, seconds: float) -> Report:
    """One report of a captured graph with its child graphs."""
    decisions = [decision for result in results for decision in result.decisions]
    fired = {rule for decision in decisions for rule in decision.rules}
    return Report(
        sites=tuple(map(_site_record, decisions)),
        near_misses=tuple(
            _near_miss_record(miss, origin, result.name) for result in results for miss, origin in result.near_misses
        ),
        rules_name=rules.name,
        rules_digest=rules.digest,
        unused_rules=tuple(rule.id for rule in rules.rules if rule.enabled and rule.id not in fired),
        events=tuple(event for result in results for event in result.events),
        graphs=1,
        nodes=nodes,
        seconds=seconds,
        artifacts={name: text for result in results if result.before for name, text in _code(result).items()},
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
    )


def _near_miss_record(miss: NearMiss, origin: Origin, graph: str) -> NearMissRecord:
    return NearMissRecord(
        miss.kind, origin.module, origin.module_class, origin.source, graph, miss.reason, miss.message
    )


def _plain(value: object) -> int | float | bool | str:
    if isinstance(value, bool | int | float | str):
        return value
    return int(value) if getattr(value, "is_Integer", False) else str(value)  # type: ignore[call-overload]


def _code(result: GraphResult) -> dict[str, str]:
    name = f"graph_{result.name}"
    before, after = (text.splitlines(keepends=True) for text in (result.before, result.after))
    diff = "".join(difflib.unified_diff(before, after, f"{name}.before.py", f"{name}.after.py"))
    return {f"{name}.before.py": result.before, f"{name}.after.py": result.after, f"{name}.diff": diff}
