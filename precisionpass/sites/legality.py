"""What must hold before a site may be replaced, whatever its kind."""

from collections.abc import Iterable

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.site import Refused

_SIZES_ONLY = {aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset}


def outside_users(node: fx.Node, interior: Iterable[fx.Node]) -> list[fx.Node]:
    """Users of a node that a rewrite would not replace; asking for a size is no use of the value."""
    return [u for u in node.users if u not in interior and graph.packet(u) not in _SIZES_ONLY and u.meta["live"]]


def check_not_mutated(nodes: tuple[fx.Node, ...], reads: Iterable[fx.Node], interior: Iterable[fx.Node]) -> None:
    """No operand may be written to between the moment the model reads it and the site's last node, where the new call
    reads it, and nothing that the site computes at any time. A view shares the memory of its base, so memories are
    compared, not nodes.
    """
    interior, reads = set(interior), set(reads)
    position = {node: index for index, node in enumerate(nodes)}
    first_read: dict[int, int] = {}
    for node in interior | reads:
        own = [position[node]] if node in interior else []
        readers = own or [position[user] for user in node.users if user in interior or user in reads]
        if graph.is_tensor(node) and readers:
            at = min(readers)
            memory = graph.storage(node)
            first_read[memory] = min(at, first_read.get(memory, at))
    last = max(position[node] for node in interior)
    for node in nodes[min(first_read.values(), default=last) : last + 1]:
        if node in interior:
            continue
        for written in graph.mutated(node):
            if graph.is_tensor(written) and first_read.get(graph.storage(written), last) < position[node]:
                raise Refused("mutated_between", written.name)


def check_one_grad_mode(interior: Iterable[fx.Node]) -> None:
    if len({node.meta.get("grad") for node in interior}) > 1:
        raise Refused("grad_mode_changes")
