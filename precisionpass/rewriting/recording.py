"""Which sites record, under which names, and the `observe` op beside a site that stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.hooks.escalation import Escalation
from precisionpass.hooks.figures import FIGURES
from precisionpass.hooks.recorder import Recorder, SiteTotals
from precisionpass.rewriting.operands import operands
from precisionpass.rewriting.settings import overrides
from precisionpass.rewriting.writer import CannotPlace, Writer
from precisionpass.shadow import Shadow
from precisionpass.sites.band import as_arguments
from precisionpass.sites.site import Attention


@dataclass(frozen=True)
class Recording:
    """How one site records. handle: what its op is given."""

    handle: str
    totals: SiteTotals


def recordings(decisions: Sequence[Decision], recorder: Recorder | None) -> dict[int, Recording]:
    """The recording of each decision that asks for one, by position; of none where there is no recorder.

    A site is named by its module, or by its place in the code; a second one there has "#2" behind it. The same site of
    a graph that is compiled again has the same name, and goes on with the same totals.
    """
    found: dict[int, Recording] = {}
    seen: Counter[str] = Counter()
    for position, decision in enumerate(decisions):
        if decision.site.kind != "attention":
            continue
        place = decision.origin.module or decision.origin.source or "model"
        seen[place] += 1
        wanted = _records(decision)
        if recorder is None or not wanted or not (decision.observed or decision.action == "rewritten"):
            continue
        name = place if seen[place] == 1 else f"{place}#{seen[place]}"
        found[position] = Recording(recorder.handle(name, wanted), recorder.site(name))
        recorder.site(name).raises |= _raises(decision)
    return found


def _records(decision: Decision) -> tuple[str, ...]:
    """What a site records: what the rules name, and what their other settings need."""
    values = decision.values
    wanted = dict.fromkeys(values["record"])
    if decision.observed and decision.site.operation.dropout:
        wanted.pop("delta_bias", None)  # the model's own dropout mask is not known
    if _raises(decision):
        wanted["nonfinite"] = None
    if _escalates(decision):
        wanted |= {FIGURES[name].record: None for name in decision.escalates_when.names}
    return tuple(wanted)


def _escalates(decision: Decision) -> bool:
    return decision.action == "rewritten" and not decision.own_action and bool(decision.values["escalate"])


def prepare(recording: Recording, decision: Decision) -> None:
    """Make the totals before the site runs, where nobody captures memory in a CUDA graph, and what lets it escalate.

    Raises ShiftTooLarge for settings an escalation cannot have.
    """
    operation = decision.site.operation
    device = graph.value(operation.output).device
    recording.totals.totals(device, operation.axes.hint((*operation.kv_heads, *operation.group)))
    if not _escalates(decision):
        return
    asked = decision.values["escalate"]
    shown = ", ".join(f"{name}={value}" for name, value in asked["to"].items())
    safer = overrides(decision, operation)
    escalation = Escalation(decision.escalates_when, safer, shown, asked["hold"], asked["window"])
    recording.totals.escalate(escalation, device)


def _raises(decision: Decision) -> bool:
    clip = decision.values["grad_clip"]
    return decision.action == "rewritten" and not decision.own_action and bool(clip) and clip["on_nonfinite"] == "raise"


def write_observer(decision: Decision, shadow: Shadow, recording: Recording, wants_gradients: bool) -> None:
    """Put `observe` behind the site's output. Raises CannotPlace, the graph as it was."""
    operation = decision.site.operation
    assert isinstance(operation, Attention)
    output = shadow.source.get(operation.output)
    if output is None:
        raise CannotPlace("its output is inside another call")
    if operation.factors:
        raise CannotPlace("its output is multiplied by a factor")
    prepare(recording, decision)
    writer = Writer(shadow, operation.output)
    writer.before = output.next
    try:
        found = operands(operation, writer)
        groups = (operation.batch, found.heads, operation.rows, operation.values)
        arranged = found.arrange.bring(output, operation.output_layout, groups)
        settings = as_arguments(operation.band, operation) or {}
        settings["record"] = recording.handle
        if not (wants_gradients and operation.output.meta.get("grad")):
            settings["record_forward"] = True
        inputs = {name: value for name, value in found.inputs.items() if name not in ("seed", "dropout_p")}
        op = torch.ops.precisionpass.observe.default
        result = writer.call(op, arranged, *found.qkv, **inputs, **settings)
        writer.replace(frozenset(), {operation.output: found.arrange.back(result, groups, operation.output_layout)})
    except Exception:
        writer.undo()
        raise
