"""Rewriting: in place on the captured graph, touching only the nodes of the sites that are to be rewritten."""

from dataclasses import dataclass

import precisionpass.ops  # noqa: F401  (importing it registers the ops)
from precisionpass.capture import Captured
from precisionpass.decide import Decision
from precisionpass.rewriting.attention import write_attention
from precisionpass.rewriting.rowwise import write_rowwise
from precisionpass.rewriting.writer import CannotPlace
from precisionpass.shadow import Shadow

__all__ = ["Rewritten", "rewrite"]


@dataclass(frozen=True)
class Rewritten:
    """A graph after rewriting, with every decision as it was carried out, and its code before and after."""

    captured: Captured
    decisions: tuple[Decision, ...]
    before: str
    after: str


def rewrite(captured: Captured, shadow: Shadow, decisions: tuple[Decision, ...]) -> Rewritten:
    """Carry out the decisions. A site whose call has no place is refused, with the reason, and left as it is."""
    before = captured.module.print_readable(print_output=False)
    done = tuple(_carry_out(captured, shadow, decision) for decision in decisions)
    if any(decision.action == "rewritten" for decision in done):
        captured.module.graph.lint()
        captured.module.recompile()
    return Rewritten(captured, done, before, captured.module.print_readable(print_output=False))


def _carry_out(captured: Captured, shadow: Shadow, decision: Decision) -> Decision:
    if decision.action != "rewritten":
        return decision
    try:
        if decision.site.kind == "attention":
            write_attention(decision, shadow, captured.wants_gradients)
        else:
            write_rowwise(decision, shadow)
    except CannotPlace as problem:
        return decision.refused("cannot_be_placed", str(problem))
    return decision
