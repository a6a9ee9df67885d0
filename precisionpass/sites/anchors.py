"""What an attention or a lone softmax is found from: a softmax, and the casts around whatever is looked for."""

from dataclasses import dataclass

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph

CASTS = {aten.to, aten._to_copy, aten.type_as}


@dataclass(frozen=True)
class SoftmaxAnchor:
    """A softmax (or log_softmax) of `scores` over dimension `dim`, computing `output`.

    `unnormalised`: `output` is exp(scores) and the division by `total`, its sum, comes later. `sink`: a logit, or 0,
    whose exponential is added to the sum. `masks`: what makes zeros of exponentials before they are summed, and what it
    is there.
    """

    scores: fx.Node
    output: fx.Node
    dim: int
    interior: frozenset[fx.Node]
    log: bool = False
    native: bool = True
    safe: bool = False
    total: fx.Node | None = None
    sink: fx.Node | float | None = None
    masks: tuple[tuple[fx.Node, bool], ...] = ()

    @property
    def unnormalised(self) -> bool:
        return self.total is not None

    @property
    def plain(self) -> bool:
        """Whether it is a softmax by itself, whatever becomes of it."""
        return not self.unnormalised and self.sink is None and not self.masks

    @property
    def statistics(self) -> torch.dtype:
        """What maximum and sum are computed in: at least FP32 inside a native softmax."""
        own = graph.dtype(self.output)
        return own if not self.native or own == torch.float64 else torch.float32


def uncast(node):
    """The node behind casts, or the node itself."""
    while isinstance(node, fx.Node) and graph.packet(node) in CASTS:
        node = node.args[0]
    return node


def casts_between(outer, inner) -> set[fx.Node]:
    """The casts from `outer` down to, not including, `inner`."""
    found = set()
    while outer is not inner and isinstance(outer, fx.Node) and graph.packet(outer) in CASTS:
        found.add(outer)
        outer = outer.args[0]
    return found
