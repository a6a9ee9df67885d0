"""Spectral norms of weights by power iteration: shown, and never a reason for an alarm by themselves.

The norms of W_Q and W_K grow in runs that fail and in runs that do not; how fast one grows is worth a look.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from precisionpass.errors import PrecisionPassError
from precisionpass.hooks.gradient_norm import is_sharded


@dataclass
class Spectrum:
    """One matrix: its spectral norm when first and when last looked at."""

    first: float
    norm: float
    vector: Tensor = field(repr=False)

    @property
    def growth(self) -> float:
        """norm / first."""
        return self.norm / self.first if self.first else float("inf") if self.norm else 1.0


class SpectralMonitor:
    """The spectral norms of the 2-D parameters whose names match, such as "*.q_proj.weight".

    Power iteration in FP32 from a fixed start, going on from the last vector at each `update`: 20 products at first, 2
    later. An estimate from below, within a few per cent where the two largest singular values are close. Waits for the
    device: call it every few hundred steps. Under FSDP2 matrices are gathered one by one: every rank calls it.
    Raises PrecisionPassError (PP504) where nothing matches.
    """

    def __init__(self, model: nn.Module, match: str = "*") -> None:
        named = [(name, one) for name, one in model.named_parameters() if one.dim() == 2]
        self._weights = {name: one for name, one in named if fnmatch.fnmatchcase(name, match)}
        if not self._weights:
            known = ", ".join(name for name, _ in named[:3])
            raise PrecisionPassError(f"no matrix is called {match!r}", where="SpectralMonitor", code="PP504",
                                     why=f"the model has {known}, ..." if known else "the model has no matrix",
                                     fix='a pattern such as "*.q_proj.weight"')  # fmt: skip
        self.found: dict[str, Spectrum] = {}

    @torch.no_grad()
    def update(self) -> dict[str, Spectrum]:
        """Look again; by name."""
        for name, weight in self._weights.items():
            matrix = (weight.full_tensor() if is_sharded(weight) else weight).detach().float()  # type: ignore[attr-defined]
            known = self.found.get(name)
            goes_on = known is not None and 0 < known.norm < torch.inf  # not from a vector of zeros or nan
            vector = known.vector if goes_on else _start(matrix)
            for _ in range(2 if goes_on else 20):
                vector = _unit(matrix.T @ (matrix @ vector))
            norm = float(torch.linalg.vector_norm(matrix @ vector))
            self.found[name] = Spectrum(known.first if known else norm, norm, vector)
        return dict(self.found)


def _start(matrix: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return _unit(torch.randn(matrix.shape[1], generator=generator).to(matrix.device))


def _unit(vector: Tensor) -> Tensor:
    return vector / torch.linalg.vector_norm(vector).clamp(min=1e-30)
