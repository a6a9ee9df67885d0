"""Safer settings at a site when its figures ask for them, and back: decided between steps, from the site's own totals.

A step is one backward of the site. Its figures add up over a window of sequences; at the end of one the condition is
asked, and where it holds the safer settings are in force from the next call on, for `hold` steps. Nothing waits for the
device: its totals are copied beside the work, and asked once they have arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from precisionpass.hooks.reading import read
from precisionpass.hooks.totals import copy_of, empty, merge

log = logging.getLogger("precisionpass")


class Condition(Protocol):
    """What is asked of figures by name."""

    text: str

    def missing(self, facts: Mapping[str, object], /) -> tuple[str, ...]: ...
    def evaluate(self, facts: Mapping[str, object], /) -> Any: ...


@dataclass(frozen=True)
class Event:
    """A change of settings at a site. step: how many backwards it had had. escalated: false for the way back."""

    site: str
    step: int
    escalated: bool
    message: str


class Escalation:
    """One site's. overrides: settings of the op while it is escalated. shown: them in words."""

    def __init__(self, when: Condition, overrides: Mapping[str, object], shown: str, hold: int, window: int) -> None:
        self.when, self.shown, self.hold, self.window = when, shown, hold, window
        self._overrides = dict(overrides)
        self.steps, self.left, self.count = 0, 0, 0
        self._told = False  # that a figure is missing
        self._totals: Tensor | None = None
        self._copied: tuple[Tensor, torch.cuda.Event | None] | None = None

    @property
    def overrides(self) -> Mapping[str, object]:
        """The settings that count now instead of the graph's."""
        return self._overrides if self.left else {}

    def after_step(self, site: str, records: Iterable[str], call: Tensor, sequences: int) -> Event | None:
        """Take the totals of one backward over so many sequences; the event where the settings change with it."""
        self.steps += 1
        if self.left:
            self.left -= 1
            return None if self.left else self._event(site, False, f"back after {self.hold} steps: {self.shown} ends")
        if self._totals is None or self._totals.shape != call.shape or self._totals.device != call.device:
            self._totals, self.count = empty(call.shape[1], call.device), 0
        merge(self._totals, call)
        self.count += sequences
        if self.count >= self.window and self._copied is None:
            self._copied = _copy(self._totals)
            self._totals, self.count = None, 0
        return self._ask(site, records)

    def _ask(self, site: str, records: Iterable[str]) -> Event | None:
        if self._copied is None or not (self._copied[1] is None or self._copied[1].query()):
            return None
        figures = read(self._copied[0], records)
        self._copied = None
        if missing := self.when.missing(figures):
            if not self._told:
                log.warning("%s: escalate cannot ask for %s: nothing records it here", site, ", ".join(missing))
            self._told = True
            return None
        if not self.when.evaluate(figures):
            return None
        self.left, self._totals, self.count = self.hold, None, 0
        found = ", ".join(f"{name} {figures[name]:.3g}" for name in sorted(figures) if name in self.when.text)
        return self._event(site, True, f"{self.when.text} ({found}): {self.shown} for {self.hold} steps")

    def _event(self, site: str, escalated: bool, message: str) -> Event:
        log.warning("%s at step %d: %s", site, self.steps, message)
        return Event(site, self.steps, escalated, message)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, on the CPU; waits for what is being copied."""
        if self._copied is not None and self._copied[1] is not None:
            self._copied[1].synchronize()
        return {
            "steps": self.steps,
            "left": self.left,
            "count": self.count,
            "totals": None if self._totals is None else self._totals.cpu(),
            "copied": None if self._copied is None else self._copied[0],
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from there; device: where the site runs."""
        self.steps, self.left, self.count = state["steps"], state["left"], state["count"]
        self._totals = None if state["totals"] is None else copy_of(state["totals"], device)
        self._copied = None if state["copied"] is None else (state["copied"].clone(), None)


def _copy(totals: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The totals on the host once the event, where there is one, has passed."""
    if totals.device.type != "cuda":
        return totals.cpu(), None
    host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
    host.copy_(totals, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
