"""Finding sites: one recogniser per kind, never one per spelling."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from precisionpass.shadow import Shadow
from precisionpass.sites.attention import find_attention
from precisionpass.sites.exponentials import softmaxes
from precisionpass.sites.legality import mutations
from precisionpass.sites.lengths import find_lengths
from precisionpass.sites.norms import find_norms
from precisionpass.sites.own import find_own
from precisionpass.sites.recogniser import Found, Recogniser, Search
from precisionpass.sites.site import NearMiss, Site
from precisionpass.sites.softmax import find_softmaxes

__all__ = ["Found", "NearMiss", "Recogniser", "Search", "Site", "default_sites", "find_sites"]

default_sites = (
    Recogniser("attention", lambda s: find_attention(s.nodes, s.softmaxes, s.writes)),
    Recogniser("softmax", lambda s: find_softmaxes([a for a in s.softmaxes if a.output not in s.taken], s.writes)),
    Recogniser("norm", lambda s: find_norms(s.nodes, s.writes)),
    Recogniser("length", lambda s: find_lengths(s.nodes)),
)


def find_sites(
    shadow: Shadow, recognisers: Sequence[Recogniser] = default_sites
) -> tuple[tuple[Site, ...], tuple[NearMiss, ...]]:
    """Every site and near miss of a shadow, in the order of the graph; a node belongs to one site. Nothing is changed.

    Raises PrecisionPassError for a recogniser of the user's that fails or gives what is no site.
    """
    nodes = tuple(shadow.graph.nodes)
    search = Search(nodes, mutations(nodes), tuple(softmaxes(nodes)))
    found: list[Site | NearMiss] = []
    for recogniser in recognisers:
        items = [_unless_taken(item, search) for item in _find(recogniser, search)]
        taken = [item.interior for item in items if isinstance(item, Site)]
        search = replace(search, taken=search.taken.union(*taken))
        found += items
    found.sort(key=lambda item: item.anchor)
    return tuple(f for f in found if isinstance(f, Site)), tuple(f for f in found if isinstance(f, NearMiss))


def _unless_taken(item: Site | NearMiss, search: Search) -> Site | NearMiss:
    if isinstance(item, Site) and item.interior & search.taken:
        return NearMiss(item.kind, "part_of_other_site", item.anchor)
    return item


def _find(recogniser: Recogniser, search: Search) -> Iterator[Site | NearMiss]:
    if recogniser in default_sites:
        return iter(recogniser.find(search))  # type: ignore[arg-type]
    return find_own(recogniser, search)
