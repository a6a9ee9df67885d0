"""Rows divided by their length: almost RMSNorms, and why they are none."""

from collections.abc import Iterator

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.site import NearMiss

_LENGTH = {aten.linalg_vector_norm, aten.norm}
_BETWEEN = {aten.expand, aten.expand_as, aten.mul, aten.div, *CASTS}


def find_lengths(nodes: tuple[fx.Node, ...]) -> Iterator[NearMiss]:
    """A near miss for every x / |x|, with the length clamped (F.normalize) or with an eps beside it."""
    for node in nodes:
        if graph.packet(node) is not aten.div or not graph.is_tensor(node.args[1]):
            continue
        reason, below = None, node.args[1]
        while graph.packet(below) in _BETWEEN | {aten.clamp_min, aten.clamp, aten.add}:
            if graph.packet(below) in (aten.clamp_min, aten.clamp):
                reason = "l2_normalise"
            elif graph.packet(below) is aten.add:
                reason = "eps_outside_root"
            below = below.args[0]  # type: ignore[union-attr]
        if graph.packet(below) in _LENGTH and below.args[0] is node.args[0]:  # type: ignore[union-attr]
            yield NearMiss("rms_norm", reason or "l2_normalise", node)
