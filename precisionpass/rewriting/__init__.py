"""Rewriting: in place on the captured graph, touching only the nodes of the sites that are to be rewritten."""

from collections.abc import Mapping
from dataclasses import dataclass

import precisionpass.ops  # noqa: F401  (importing it registers the ops)
from precisionpass.capture import Captured
from precisionpass.decide import Decision
from precisionpass.rewriting.attention import write_attention
from precisionpass.rewriting.own import Actions, write_own
from precisionpass.rewriting.rowwise import write_rowwise
from precisionpass.rewriting.writer import CannotPlace, Placed
from precisionpass.shadow import Shadow, fill_in_examples
from precisionpass.sites.site import Attention, Own

__all__ = ["Placed", "Rewritten", "rewrite"]


@dataclass(frozen=True)
class Rewritten:
    """A graph after rewriting, with every decision as it was carried out.

    placed: position of a rewritten decision -> what took the place of its results.
    """

    captured: Captured
    decisions: tuple[Decision, ...]
    placed: Mapping[int, Placed]


def rewrite(
    captured: Captured, shadow: Shadow, decisions: tuple[Decision, ...], actions: Actions | None = None
) -> Rewritten:
    """Carry out the decisions. A site whose call has no place is refused, with the reason, and left as it is.

    actions: the user's, by name. Raises PrecisionPassError where one fails or gives what is not asked for.
    """
    done, placed = list(decisions), {}
    old = frozenset(captured.module.graph.nodes)
    for position, decision in enumerate(decisions):
        if decision.action != "rewritten":
            continue
        try:
            placed[position] = _write(captured, shadow, decision, actions or {})
        except CannotPlace as problem:
            done[position] = decision.refused(problem.reason, str(problem))
        new = (node for node in captured.module.graph.nodes if node not in old)
        fill_in_examples(captured.module, new, captured.ambient)
    if placed:
        captured.module.graph.lint()
        captured.module.recompile()
    return Rewritten(captured, tuple(done), placed)


def _write(captured: Captured, shadow: Shadow, decision: Decision, actions: Actions) -> Placed:
    if isinstance(decision.site.operation, Attention):
        return write_attention(decision, shadow, captured.wants_gradients, actions)
    if isinstance(decision.site.operation, Own):
        return write_own(decision, shadow, actions)
    return write_rowwise(decision, shadow, actions)
