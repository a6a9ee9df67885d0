"""Where the figures of a compiled model add up: FP64 totals on the device, a few numbers for each site and head.

An op finds its totals by text, "RECORDER/SITE", which is one of its arguments. The pass runs before any cache of
compiled code is asked and makes the site known, so a cached graph finds it too; where nobody has (a program that was
exported, a site that a review runs alone) nothing is recorded. Inside the op nothing is read back to the host.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from precisionpass.hooks.figures import MAXIMA, ROWS, SUMS, WHOLE

_KNOWN: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class SiteTotals:
    """The totals of one site: [len(ROWS), heads] FP64 on each device it has run on.

    records: what is recorded. overrides: settings of the op that count instead of the graph's, while escalated.
    raises: a non-finite gradient is an error at the next check.
    """

    def __init__(self, name: str, records: Iterable[str]) -> None:
        self.name, self.records = name, frozenset(records)
        self.overrides: Mapping[str, object] = {}
        self.raises = False
        self.sequences = 0  # since the last window of an escalation; counted on the host
        self._totals: dict[tuple[torch.device, int], Tensor] = {}

    def totals(self, device: torch.device, heads: int) -> Tensor:
        """The totals for tensors on this device with so many heads; made when first asked for."""
        key = (device, heads)
        if key not in self._totals:
            self._totals[key] = empty(heads, device)
        return self._totals[key]

    def add(self, parts: Mapping[str, Tensor], heads: int, sequences: int) -> None:
        """Add the figures of one call: name of a row -> [heads], or one number for a row of WHOLE."""
        device = next(iter(parts.values())).device
        call = empty(heads, device)
        call[ROWS.index("sequences")] = sequences
        for name, value in parts.items():
            row = call[ROWS.index(name)]
            (row[0] if name in WHOLE else row).copy_(value)
        self.sequences += sequences
        merge(self.totals(device, heads), call)

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
        self._totals[torch.device("cpu"), totals.shape[1]] = totals.to(torch.float64, copy=True)

    def reset(self) -> None:
        """Begin anew."""
        self.sequences = 0
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


def empty(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Totals of nothing: zeros, and -inf where the largest counts."""
    totals = torch.zeros(len(ROWS), heads, dtype=torch.float64, device=device)
    totals[len(SUMS) :] = -torch.inf
    return totals


def merge(totals: Tensor, more: Tensor) -> None:
    """Add `more` to `totals`, in place: sums to sums, the larger of two maxima."""
    totals[: len(SUMS)] += more[: len(SUMS)]
    largest = totals[-len(MAXIMA) :]
    torch.maximum(largest, more[-len(MAXIMA) :], out=largest)
