"""Rewriting: in place on the captured graph, touching only the nodes of the sites that are to be rewritten."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import precisionpass.ops  # noqa: F401  (importing it registers the ops)
from precisionpass.capture import Captured
from precisionpass.decide import Decision
from precisionpass.hooks.recorder import Recorder
from precisionpass.rewriting.attention import write_attention
from precisionpass.rewriting.hooking import Hooks
from precisionpass.rewriting.own import Actions, write_own
from precisionpass.rewriting.recording import Recording, recordings, write_observer
from precisionpass.rewriting.rowwise import write_rowwise
from precisionpass.rewriting.writer import CannotPlace, Placed
from precisionpass.shadow import Shadow, fill_in_examples
from precisionpass.sites.site import Attention, Own

__all__ = ["Placed", "Rewritten", "rewrite"]

NO_RECORDER = "nobody can read them from an exported program"


@dataclass(frozen=True)
class Rewritten:
    """A graph after rewriting, with every decision as it was carried out.

    placed: position of a rewritten decision -> what took the place of its results.
    """

    captured: Captured
    decisions: tuple[Decision, ...]
    placed: Mapping[int, Placed]


def rewrite(
    captured: Captured, shadow: Shadow, decisions: tuple[Decision, ...], actions: Actions | None = None,
    recorder: Recorder | None = None, hooks: Hooks | None = None,
) -> Rewritten:  # fmt: skip
    """Carry out the decisions. A site whose call has no place is refused, with the reason, and left as it is.

    actions, hooks: the user's, by name. recorder: where figures go; without one none are recorded.
    Raises PrecisionPassError where a function of the user's fails or gives what is not asked for.
    """
    done, placed = list(decisions), {}
    recording = recordings(decisions, recorder)
    old = frozenset(captured.module.graph.nodes)
    for position, decision in enumerate(decisions):
        if decision.action != "rewritten" and not decision.observed:
            continue
        try:
            if decision.observed:
                _observe(captured, shadow, decision, recording.get(position))
            else:
                placed[position] = _write(
                    captured, shadow, decision, actions or {}, hooks or {}, recording.get(position)
                )
                if recorder is None and (decision.values.get("record") or decision.values.get("escalate")):
                    done[position] = decision.noting(f"its figures are not recorded: {NO_RECORDER}")
        except CannotPlace as problem:
            refused = decision.not_recorded if decision.observed else partial(decision.refused, problem.reason)
            done[position] = refused(str(problem))
        new = (node for node in captured.module.graph.nodes if node not in old)
        fill_in_examples(captured.module, new, captured.ambient)
    if placed or any(decision.observed for decision in done):
        captured.module.graph.lint()
        captured.module.recompile()
    return Rewritten(captured, tuple(done), placed)


def _observe(captured: Captured, shadow: Shadow, decision: Decision, recording: Recording | None) -> None:
    if recording is None:
        raise CannotPlace(NO_RECORDER)
    write_observer(decision, shadow, recording, captured.wants_gradients)


def _write(
    captured: Captured, shadow: Shadow, decision: Decision, actions: Actions, hooks: Hooks, recording: Recording | None
) -> Placed:
    if isinstance(decision.site.operation, Attention):
        return write_attention(decision, shadow, captured.wants_gradients, actions, hooks, recording)
    if isinstance(decision.site.operation, Own):
        return write_own(decision, shadow, actions)
    return write_rowwise(decision, shadow, actions, captured.wants_gradients)
