"""Rows divided by their length: almost RMSNorms, and why they are none."""

from collections.abc import Iterator

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import CASTS
from precisionpass.sites.moments import LENGTHS
from precisionpass.sites.roots import normalised
from precisionpass.sites.site import NearMiss

_BETWEEN = {
    aten.expand, aten.expand_as, aten.unsqueeze, aten.mul, aten.div, aten.clamp_min, aten.clamp, aten.add, *CASTS,
}  # fmt: skip


def find_lengths(nodes: tuple[fx.Node, ...]) -> Iterator[NearMiss]:
    """A near miss for every x / |x|, with the length clamped (F.normalize) or with an eps beside it."""
    for node in nodes:
        if graph.packet(node) is not aten.div or not graph.is_tensor(node.args[1]) or any(normalised(node)):
            continue
        below = node.args[1]
        while graph.packet(below) in _BETWEEN:
            below = below.args[0]  # type: ignore[union-attr]
        if graph.packet(below) in LENGTHS and below.args[0] is node.args[0]:  # type: ignore[union-attr]
            yield NearMiss("rms_norm", "l2_normalise", node)
