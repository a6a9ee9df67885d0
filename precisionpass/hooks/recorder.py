"""Where the figures of a compiled model add up: FP64 totals on the device, a few numbers for each site and head.

An op finds its totals by text, "RECORDER/SITE", which is one of its arguments. The pass runs before any cache of
compiled code is asked and makes the site known, so a cached graph finds it too; where nobody has (a program that was
exported, a site that a review runs alone) nothing is recorded. Inside the op nothing is read back to the host.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from precisionpass.hooks.escalation import Escalation, Event
from precisionpass.hooks.figures import ROWS, WHOLE
from precisionpass.hooks.totals import copy_of, empty, merge

_KNOWN: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class SiteTotals:
    """The totals of one site: [len(ROWS), heads] FP64 on each device it has run on.

    records: what is recorded. raises: a non-finite gradient is an error at the next check. events: what its escalation
    has done.
    """

    def __init__(self, name: str, records: Iterable[str]) -> None:
        self.name, self.records = name, frozenset(records)
        self.raises = False
        self.escalation: Escalation | None = None
        self.events: list[Event] = []
        self._totals: dict[tuple[torch.device, int], Tensor] = {}
        self._to_go_on_from: Mapping[str, Any] | None = None

    @property
    def overrides(self) -> Mapping[str, object]:
        """Settings of the op that count instead of the graph's just now."""
        return self.escalation.overrides if self.escalation is not None else {}

    def escalate(self, escalation: Escalation, device: torch.device) -> None:
        """Let the site escalate, from where a checkpoint left it; a graph that is compiled again changes nothing."""
        if self.escalation is None:
            self.escalation = escalation
            if self._to_go_on_from is not None:
                escalation.load_state_dict(self._to_go_on_from, device)

    def totals(self, device: torch.device, heads: int) -> Tensor:
        """The totals for tensors on this device with so many heads; made when first asked for."""
        key = (device, heads)
        if key not in self._totals:
            self._totals[key] = empty(heads, device)
        return self._totals[key]

    def add(
        self, parts: Mapping[str, Tensor], numbers: Mapping[str, int], heads: int, device: torch.device, is_step: bool,
        call: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add the figures of one call: name of a row -> [heads], or one number for a row of WHOLE.

        numbers: rows that are the same for each head. is_step: the call was a backward. call: totals to begin from,
        which hold `numbers` already.
        """
        if call is None:
            call = empty(heads, device)
            for name, number in numbers.items():
                call[ROWS.index(name)] = number
        for name, value in parts.items():
            row = call[ROWS.index(name)]
            (row[0] if name in WHOLE else row).copy_(value)
        merge(self.totals(device, heads), call)
        if self.escalation is not None and is_step:
            event = self.escalation.after_step(self.name, self.records, call, numbers["sequences"])
            self.events += [event] if event else []

    def together(self) -> Tensor:
        """The totals of all devices on the CPU, [len(ROWS), heads]; waits for them.

        A site that has run with several numbers of heads has a column for each head of each.
        """
        by_heads: dict[int, Tensor] = {}
        for (_, heads), totals in self._totals.items():
            merge(by_heads.setdefault(heads, empty(heads)), totals.cpu())
        return torch.cat(list(by_heads.values()) or [empty(1)], 1)

    def restore(self, totals: Tensor) -> None:
        """Begin from what `together` gave; on the CPU, beside what the device goes on to add."""
        self.reset()
        self._totals[torch.device("cpu"), totals.shape[1]] = copy_of(totals)

    def escalation_state(self) -> Mapping[str, Any] | None:
        """Where the escalation stands, also one that has not been captured since a checkpoint; None where none is."""
        return self.escalation.state_dict() if self.escalation is not None else self._to_go_on_from

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Let the escalation, now or once there is one, go on from its state."""
        self._to_go_on_from = state
        if self.escalation is not None:
            device = next((device for device, _ in self._totals if device.type != "cpu"), torch.device("cpu"))
            self.escalation.load_state_dict(state, device)

    def reset(self) -> None:
        """Begin anew; an escalation goes on."""
        for (device, heads), totals in self._totals.items():
            totals.copy_(empty(heads, device))


class Recorder:
    """The sites of one compilation that record, by name."""

    def __init__(self) -> None:
        self.name = str(next(_NUMBERS))
        self.sites: dict[str, SiteTotals] = {}
        _KNOWN[self.name] = self

    def handle(self, site: str, records: Iterable[str]) -> str:
        """The text by which an op finds the totals of this site; further records of a known site join."""
        self.site(site).records |= frozenset(records)
        return f"{self.name}/{site}"

    def site(self, name: str) -> SiteTotals:
        """The totals of a site; one that is not known yet is made, and records nothing."""
        return self.sites.setdefault(name, SiteTotals(name, ()))

    def __deepcopy__(self, memo: dict) -> None:
        return None


def find(handle: str) -> SiteTotals | None:
    """The totals that an op's `record` names, or None where nothing is to be recorded."""
    name, _, site = handle.partition("/")
    recorder = _KNOWN.get(name) if handle else None
    return recorder.sites.get(site) if recorder is not None else None
