"""Inputs on which low-precision attention fails, and controls that must stay benign (NUMERICS 4).

All have width 64 and length 128. What makes a case is in the seed's fixed state (directions, persistent values); the
rest is fresh in every sequence. A sink is a key of 4 k0, a query is 2 m k0 + noise orthogonal to k0, and the scale is
1/8: a sink scores m, every other key about 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDTH = 64
LENGTH = 128
SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Case:
    """One attention and its upstream gradient: q, k, v, dO [sequences, 1, 128, 64]; mask: bool, True = may attend.

    ``x`` [sequences, 128, 64] FP32 is the layer input that a gradient of W_Q would be taken with.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    x: Tensor
    causal: str = "none"
    mask: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another format."""
        converted = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "upstream")}
        return replace(self, **converted)


class _Source:
    """Random numbers of one case: ``fixed`` depends on the seed alone, ``fresh`` on the seed and the step too."""

    def __init__(self, seed: int, step: int, sequences: int) -> None:
        self.sequences = sequences
        self.fixed = torch.Generator().manual_seed(seed)
        self.fresh = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        self.direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=self.fixed), dim=0)

    def normal(self, *shape: int) -> Tensor:
        """Fresh standard normal numbers, [sequences, 1, *shape]."""
        return torch.randn(self.sequences, 1, *shape, generator=self.fresh)

    def uniform(self, low: float, high: float) -> Tensor:
        """A fresh number for each row or key, [sequences, 1, 128, 1]."""
        return low + (high - low) * torch.rand(self.sequences, 1, LENGTH, 1, generator=self.fresh)

    def orthogonal(self) -> Tensor:
        """Fresh normal rows without their part along the direction."""
        rows = self.normal(LENGTH, WIDTH)
        return rows - (rows @ self.direction).unsqueeze(-1) * self.direction

    def signed_values(self) -> Tensor:
        """V of one sign: -(.5 + |1 + .3 N|)."""
        return -(0.5 + (1 + 0.3 * self.normal(LENGTH, WIDTH)).abs())

    def fixed_value(self) -> Tensor:
        """One row of V that is the same in every sequence and step."""
        return -(0.5 + (1 + 0.3 * torch.randn(WIDTH, generator=self.fixed)).abs())

    def case(self, name: str, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor | None = None, **more: object) -> Case:
        """The case in BF16, with dO = .3 + .3 N unless given, and x = xbar + .5 N with a fixed xbar."""
        if upstream is None:
            upstream = 0.3 + 0.3 * self.normal(LENGTH, WIDTH)
        center = torch.randn(WIDTH, generator=self.fixed)
        x = center + 0.5 * torch.randn(self.sequences, LENGTH, WIDTH, generator=self.fresh)
        return Case(name, q, k, v, upstream, x, **more).to(torch.bfloat16)


def _with_sinks(source: _Source, positions: list[int]) -> Tensor:
    key = source.orthogonal()
    key[:, :, positions] = 4 * source.direction
    return key


def twin_sink(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """G1: two sinks with the same key, m ~ U(10, 14), V fresh: every row's maximum stands twice."""
    source = _Source(seed, step, sequences)
    query = 0.5 * source.orthogonal() + 2 * source.uniform(10, 14) * source.direction
    return source.case("G1 twin sink", query, _with_sinks(source, [0, 1]), source.signed_values())


def persistent_sink(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """G2: one sink, m ~ U(9.5, 12.5), whose V is the same in all sequences; no tie at all."""
    source = _Source(seed, step, sequences)
    query = 0.5 * source.orthogonal() + 2 * source.uniform(9.5, 12.5) * source.direction
    value = source.signed_values()
    value[:, :, 0] = source.fixed_value()
    return source.case("G2 persistent sink", query, _with_sinks(source, [0]), value)


def constant_maximum(seed: int, step: int = 0, sequences: int = 32, m: float = 20.0) -> Case:
    """G3 (m = 20, control 19) and G4 (m = 12): every query bit-identical, two sinks."""
    source = _Source(seed, step, sequences)
    query = (2 * m * source.direction).expand(sequences, 1, LENGTH, WIDTH)
    return source.case(f"G3 constant maximum {m:g}", query, _with_sinks(source, [0, 1]), source.signed_values())


def padding(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """G5: positions 64..127 have one key and one value, m ~ U(6, 9): O is that value."""
    source = _Source(seed, step, sequences)
    query = 0.5 * source.orthogonal() + 2 * source.uniform(6, 9) * source.direction
    value = source.signed_values()
    value[:, :, 64:] = source.fixed_value()
    return source.case("G5 padding", query, _with_sinks(source, list(range(64, LENGTH))), value)


def large_scores(seed: int, step: int = 0, sequences: int = 32, m: float = 50.0, sign: int = 1) -> Case:
    """G6 (sign 1, m 50 and 100) and G7 (sign -1, m 25 and 100, causal): scores up to 4 below +-m, keys 0 = 1."""
    source = _Source(seed, step, sequences)
    size = (8 * m) ** 0.5
    query = size * source.direction + 0.5 * source.orthogonal()
    along = sign * size * (1 - sign * source.uniform(0, 4) / m)
    key = along * source.direction + 0.5 * source.orthogonal()
    key[:, :, 1] = key[:, :, 0]
    name, causal = ("G6 large", "none") if sign > 0 else ("G7 negative", "top_left")
    return source.case(f"{name} {sign * m:g}", query, key, source.signed_values(), causal=causal)


def left_padding(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """G8: causal, the first 0..48 keys of a sequence masked: rows that may attend to nothing."""
    source = _Source(seed, step, sequences)
    count = torch.randint(0, 49, (sequences, 1, 1, 1), generator=source.fresh)
    count[0], count[-1] = 48, 0
    mask = torch.arange(LENGTH).view(1, 1, 1, LENGTH) >= count
    query, key = source.normal(LENGTH, WIDTH), source.normal(LENGTH, WIDTH)
    return source.case("G8 left padding", query, key, source.signed_values(), causal="top_left", mask=mask)


def normal(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """Control: everything standard normal."""
    source = _Source(seed, step, sequences)
    q, k, v, upstream = (source.normal(LENGTH, WIDTH) for _ in range(4))
    return source.case("normal", q, k, v, upstream)


def vocabulary(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """Control: tokens of a Zipf vocabulary of rank 16, a BOS sink in front; values without a common sign."""
    source = _Source(seed, step, sequences)
    basis = torch.randn(3, 16, WIDTH, generator=source.fixed)
    codes = torch.randn(1000, 16, generator=source.fixed) / 4
    token = torch.multinomial(1 / torch.arange(1.0, 1001.0), sequences * LENGTH, True, generator=source.fresh)
    q, k, v = (codes[token] @ table for table in basis)
    q, k, v = (part.view(sequences, 1, LENGTH, WIDTH) for part in (q, k, v))
    q = q - (q @ source.direction).unsqueeze(-1) * source.direction + 12 * source.direction
    k = k - (k @ source.direction).unsqueeze(-1) * source.direction
    k[:, :, 0], v[:, :, 0] = 4 * source.direction, basis[2, 0]
    return source.case("vocabulary", q, k, v, source.normal(LENGTH, WIDTH), causal="top_left")


def duplicated(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """Control: every token stands twice."""
    source = _Source(seed, step, sequences)
    q, k, v = (source.normal(LENGTH // 2, WIDTH).repeat_interleave(2, 2) for _ in range(3))
    return source.case("duplicated", q, k, v, source.normal(LENGTH, WIDTH))


def zero_scores(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """Control: q = 0, a uniform average."""
    source = _Source(seed, step, sequences)
    q = torch.zeros(sequences, 1, LENGTH, WIDTH)
    return source.case("zero scores", q, source.normal(LENGTH, WIDTH), source.normal(LENGTH, WIDTH))


def balanced_ties(seed: int, step: int = 0, sequences: int = 32) -> Case:
    """Control: the twin sink with V and dO of zero mean."""
    case = twin_sink(seed, step, sequences)
    source = _Source(seed + 7919, step, sequences)
    v, upstream = (source.normal(LENGTH, WIDTH).to(torch.bfloat16) for _ in range(2))
    return replace(case, name="balanced ties", v=v, upstream=upstream)


Generator = Callable[..., Case]

SHARP: dict[str, Generator] = {
    "G1": twin_sink,
    "G2": persistent_sink,
    "G3": constant_maximum,
    "G3 control": lambda *place, **more: constant_maximum(*place, m=19.0, **more),
    "G4": lambda *place, **more: constant_maximum(*place, m=12.0, **more),
    "G5": padding,
}
"""The cases whose rho is held to the tighter limit."""

WIDE: dict[str, Generator] = {
    "G6 50": large_scores,
    "G6 100": lambda *place, **more: large_scores(*place, m=100.0, **more),
    "G7 25": lambda *place, **more: large_scores(*place, m=25.0, sign=-1, **more),
    "G7 100": lambda *place, **more: large_scores(*place, m=100.0, sign=-1, **more),
    "G8": left_padding,
}
"""Large scores, and rows that see nothing."""

CONTROLS: dict[str, Generator] = {
    "normal": normal,
    "vocabulary": vocabulary,
    "duplicated": duplicated,
    "zero scores": zero_scores,
    "balanced ties": balanced_ties,
}
"""Inputs on which nothing is wrong with any arithmetic."""
