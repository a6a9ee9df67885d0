"""What a person asks of a running model: its figures, its alarms, and the state to keep with a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from precisionpass.errors import PrecisionPassError
from precisionpass.hooks.escalation import Event
from precisionpass.hooks.figures import ROWS, SUMS
from precisionpass.hooks.reading import Alarm, alarms, read
from precisionpass.hooks.recorder import Recorder


class Monitor:
    """The figures of a compiled model. Reading waits for the device; recording never does.

    In a distributed run read, check and state_dict are collective: every rank calls them, and every rank gets the
    figures of all ranks.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def read(self) -> dict[str, dict[str, Any]]:
        """Figures by site: {"model.layers.0.attn": {"sequences": 512, "delta_bias": 2e-7, ...}}, plain numbers.

        A site that has not run yet has "sequences": 0. docs/monitors.md says what each figure is.
        """
        return {name: read(totals, self._recorder.sites[name].records) for name, totals in self._totals().items()}

    def scalars(self) -> dict[str, float]:
        """Every figure that is one number, as "SITE/FIGURE"."""
        return {
            f"{name}/{figure}": float(value)
            for name, figures in self.read().items()
            for figure, value in figures.items()
            if not isinstance(value, list)
        }

    def write(self, writer: Any, step: int) -> None:
        """Hand every figure to a TensorBoard SummaryWriter, or to whatever has its add_scalar(name, value, step)."""
        for name, value in self.scalars().items():
            writer.add_scalar(f"precisionpass/{name}", value, step)

    def alarms(self) -> list[Alarm]:
        """What is beyond its limit just now, site by site."""
        sites = self._recorder.sites
        return [alarm for name, found in self.read().items() for alarm in alarms(name, found, sites[name].raises)]

    def check(self, on_alarm: Literal["raise", "warn"] = "raise") -> list[Alarm]:
        """The alarms, after raising PrecisionPassError for them, or warning of each."""
        found = self.alarms()
        if found and on_alarm == "raise":
            first = found[0]
            raise PrecisionPassError(
                f"{len(found)} alarm{'s' if len(found) > 1 else ''}: {first.message}", where=first.site, code="PP501",
                why="; ".join(f"{one.site}: {one.message}" for one in found[1:]),
                fix=ADVICE[first.kind],
            )  # fmt: skip
        for alarm in found:
            warnings.warn(f"precisionpass: {alarm.site}: {alarm.message}; {ADVICE[alarm.kind]}", stacklevel=2)
        return found

    @property
    def events(self) -> list[Event]:
        """What escalations have done, site by site: Event(site, step, escalated, message)."""
        return [event for _, site in sorted(self._recorder.sites.items()) for event in site.events]

    def reset(self) -> None:
        """Begin anew: every figure from zero."""
        for site in self._recorder.sites.values():
            site.reset()

    def state_dict(self) -> dict[str, Any]:
        """What to keep with a checkpoint, on the CPU: the totals over all ranks, escalations, and what they did."""
        sites = self._recorder.sites.values()
        states = {site.name: site.escalation_state() for site in sites}
        return {
            "totals": self._totals(),
            "escalations": {name: state for name, state in states.items() if state is not None},
            "events": {site.name: [asdict(event) for event in site.events] for site in sites},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. A site that is not known yet takes its part when it is captured.

        Raises PrecisionPassError (PP501) for the state of another version, whose figures are others.
        """
        if any(len(totals) != len(ROWS) for totals in state["totals"].values()):
            raise PrecisionPassError("figures of another version", where="monitor.load_state_dict", code="PP501",
                                     why=f"a site has {len(ROWS)} sums and maxima here",
                                     fix="leave the monitor's state out: the model needs none of it")  # fmt: skip
        is_first = not _distributed() or distributed.get_rank() == 0
        for name, totals in state["totals"].items():
            site = self._recorder.site(name)
            site.restore(totals) if is_first else site.reset()
        for name, escalation in state["escalations"].items():
            self._recorder.site(name).go_on_from(escalation)
        for name, events in state["events"].items():
            self._recorder.site(name).events = [Event(**event) for event in events]

    def _totals(self) -> dict[str, Tensor]:
        """[len(ROWS), columns] by site on the CPU, over all ranks; a column for each head."""
        found = {}
        for name in sorted(self._recorder.sites):
            totals = self._recorder.sites[name].together()
            found[name] = _over_ranks(totals) if _distributed() else totals
        return found


ADVICE = {
    "delta_bias": "set delta: residual or recompute there, or escalate",
    "row_sum": "look at row_max_shift, and at scores beyond what the dtype holds",
    "nonfinite": "look at the loss scale and at what feeds the site; on_nonfinite: zero goes on without them",
}


def _distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _over_ranks(totals: Tensor) -> Tensor:
    on_device = totals.cuda() if distributed.get_backend() == "nccl" else totals.clone()
    sums, largest = on_device[: len(SUMS)].contiguous(), on_device[len(SUMS) :].contiguous()
    distributed.all_reduce(sums)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return torch.cat([sums, largest]).cpu()
