"""Finding sites: one recogniser per kind, never one per spelling."""

from precisionpass.shadow import Shadow
from precisionpass.sites.anchors import softmaxes
from precisionpass.sites.attention import find_attention
from precisionpass.sites.legality import mutations
from precisionpass.sites.lengths import find_lengths
from precisionpass.sites.norms import find_norms
from precisionpass.sites.site import NearMiss, Site
from precisionpass.sites.softmax import find_softmaxes

__all__ = ["NearMiss", "Site", "find_sites"]


def find_sites(shadow: Shadow) -> tuple[tuple[Site, ...], tuple[NearMiss, ...]]:
    """Every site and near miss of a shadow, in the order of the graph. Nothing is changed."""
    nodes = tuple(shadow.graph.nodes)
    anchors = tuple(softmaxes(nodes))
    writes = mutations(nodes)
    found = list(find_attention(nodes, anchors, writes))
    taken = {node for item in found if isinstance(item, Site) for node in item.interior}
    found += find_softmaxes([anchor for anchor in anchors if anchor.output not in taken], writes)
    found += find_norms(nodes, writes)
    found += find_lengths(nodes)
    found.sort(key=lambda item: item.anchor)
    return tuple(f for f in found if isinstance(f, Site)), tuple(f for f in found if isinstance(f, NearMiss))
