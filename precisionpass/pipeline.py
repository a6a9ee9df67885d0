"""The story on one page: captured graph -> shadow -> sites -> decisions -> rewritten graph -> report."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from precisionpass.capture import Captured, captured_graphs
from precisionpass.decide import decide, origin_of
from precisionpass.errors import PrecisionPassError
from precisionpass.extensions import NONE, Extensions
from precisionpass.hooks.recorder import Recorder
from precisionpass.review.graphs import GraphResult, place_of, report_of
from precisionpass.review.report import Report
from precisionpass.rewriting import rewrite
from precisionpass.rules import RuleSet
from precisionpass.shadow import holds_anchor, make_shadow
from precisionpass.sites import find_sites
from precisionpass.snapshot import snapshot

log = logging.getLogger("precisionpass")


def run(
    module: fx.GraphModule, rules: RuleSet, modules: Mapping[str, str], training: bool, guarded: bool = True,
    own: Extensions = NONE, recorder: Recorder | None = None,
) -> Report:  # fmt: skip
    """Rewrite a captured graph and its child graphs in place as the rules say.

    modules: id of a module, as text, to its exact name. guarded: whether torch checks at every call what is assumed of
    symbolic sizes. own: the user's recognisers and actions. recorder: where figures go. Returns the report of
    everything done and not done.
    """
    started = time.perf_counter()
    nodes = len(module.graph.nodes)
    if rules.is_off:
        return report_of((), rules, nodes)
    graphs = captured_graphs(module, modules, training, guarded)
    report = report_of(tuple(_one_graph(captured, rules, own, recorder) for captured in graphs), rules, nodes)
    return replace(report, seconds=time.perf_counter() - started)


def _one_graph(captured: Captured, rules: RuleSet, own: Extensions, recorder: Recorder | None) -> GraphResult:
    """All of it or nothing: an error of ours costs coverage, never the user's run, and the graph is as it was."""
    if not own.kinds and not holds_anchor(captured.module):
        return GraphResult(captured)
    as_it_was = snapshot(captured.module)
    try:
        shadow = make_shadow(captured.module, captured.ambient)
        sites, near_misses = find_sites(shadow, own.sites)
        decisions = decide(captured, sites, rules)
        missed = tuple((miss, origin_of(captured, miss)) for miss in near_misses)
        places = tuple(place_of(decision.site, shadow) for decision in decisions)
        rewritten = rewrite(captured, shadow, decisions, own.actions, recorder, own.hooks)
    except PrecisionPassError:
        raise
    except Exception as problem:
        as_it_was.restore()
        log.warning("graph %s was left alone", captured.name, exc_info=problem)
        return GraphResult(captured, events=(_left_alone(captured, problem),))
    return GraphResult(captured, as_it_was.graph, rewritten.decisions, places, rewritten.placed, missed)


def _left_alone(captured: Captured, problem: Exception) -> str:
    first_line = (str(problem).strip().splitlines() or [""])[0][:200]
    return f"graph {captured.name} could not be analysed and was left alone: {type(problem).__name__}: {first_line}"
