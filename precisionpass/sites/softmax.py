"""Softmaxes and log_softmaxes that are no part of an attention."""

from collections.abc import Iterable, Iterator

from torch import fx

from precisionpass import graph
from precisionpass.sites.anchors import SoftmaxAnchor
from precisionpass.sites.describe import short
from precisionpass.sites.legality import check_not_mutated, outside_users
from precisionpass.sites.site import NearMiss, Refused, Rowwise, Site


def find_softmaxes(anchors: Iterable[SoftmaxAnchor], writes: tuple[fx.Node, ...]) -> Iterator[Site | NearMiss]:
    """A site for every anchor whose intermediate values are used by nothing else."""
    for anchor in anchors:
        if not anchor.plain:
            continue
        kind = "log_softmax" if anchor.log else "softmax"
        try:
            for node in anchor.interior - {anchor.output}:
                if outside_users(node, anchor.interior):
                    raise Refused("scores_used_elsewhere", node.name)
            check_not_mutated(writes, [anchor.scores], anchor.interior)
        except Refused as refusal:
            yield NearMiss(kind, refusal.reason, anchor.output, refusal.detail)
            continue
        operation = Rowwise(anchor.scores, anchor.output, (anchor.dim,))
        facts = {
            "dtype": short(graph.dtype(anchor.scores)),
            "device": graph.value(anchor.output).device.type,
            "statistics": short(anchor.statistics),
            "width": graph.expression(graph.shape(anchor.scores)[anchor.dim]) if graph.shape(anchor.scores) else 1,
        }
        yield Site(kind, operation, anchor.interior, facts, f"{kind}(x, dim={anchor.dim})", anchor.output)
