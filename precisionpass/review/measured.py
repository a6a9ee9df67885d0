"""Figures against float64 in a report: what the repro file of each rewritten site measures, when asked for."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace

from precisionpass.measure import Row, compare, start_over
from precisionpass.review.folding import likeness
from precisionpass.review.report import Report

log = logging.getLogger("precisionpass")

Figures = Mapping[str, Mapping[str, float]]  # tensor -> old_error, new_error, old_bias, new_bias


def with_measures(report: Report) -> Report:
    """The report with every rewritten site that has a repro file measured: one of several equal sites stands for all.

    A site that cannot be measured, for want of memory or of an op, is told as an event.
    """
    found: dict[str, Figures] = {}
    events = list(report.events)
    for site in report.sites:
        text = report.artifacts.get(site.calls.repro, "") if site.calls else ""
        if not text or likeness(site) in found:
            continue
        try:
            found[likeness(site)] = _figures(_rows(text))
        except Exception as problem:  # the site's own calls run here: whatever they raise costs a figure, no report
            log.warning("%s could not be measured", site.module, exc_info=problem)
            events.append(f"{site.module or 'the model itself'} could not be measured: {type(problem).__name__}")
    sites = tuple(replace(site, measured=found.get(likeness(site), {})) for site in report.sites)
    return replace(report, sites=sites, events=tuple(events))


def _rows(text: str) -> tuple[Row, ...]:
    """What the file finds when it is run: it was written by this package, from the graph, with every name escaped."""
    names: dict = {"__name__": "repro"}
    exec(compile(text, "<repro>", "exec"), names)
    start_over()
    return compare(names["old"], names["new"], names["inputs"]())


def _figures(rows: tuple[Row, ...]) -> Figures:
    figures = {}
    for row in rows:
        figures[row.name] = {name: value for name, value in asdict(row).items() if name != "name"}
    return figures
