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
    """No tensor that the site reads or makes may be written to between its first and its last node.

    A view shares the memory of its base, so memories are compared, not nodes.
    """
    interior = set(interior)
    order = sorted(interior, key=nodes.index)
    first, last = nodes.index(order[0]), nodes.index(order[-1])
    memory = {graph.storage(n) for n in (*interior, *reads) if graph.is_tensor(n)}
    for node in nodes[first : last + 1]:
        if node in interior:
            continue
        for written in graph.mutated(node):
            if graph.is_tensor(written) and graph.storage(written) in memory:
                raise Refused("mutated_between", written.name)


def check_one_grad_mode(interior: Iterable[fx.Node]) -> None:
    if len({node.meta.get("grad") for node in interior}) > 1:
        raise Refused("grad_mode_changes")
