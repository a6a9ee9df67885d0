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


def mutations(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The calls that write to a tensor."""
    return tuple(node for node in nodes if graph.mutated(node))


def check_not_mutated(writes: tuple[fx.Node, ...], reads: Iterable[fx.Node], interior: Iterable[fx.Node]) -> None:
    """No operand may be written to between the moment the model reads it and the site's last node, where the new call
    reads it, and nothing that the site computes at any time. A view shares the memory of its base, so memories are
    compared, not nodes. writes: the graph's `mutations`.
    """
    interior, reads = set(interior), set(reads)
    writes = tuple(node for node in writes if node not in interior)
    if not writes:
        return
    first_read: dict[int, fx.Node] = {}
    for node in interior | reads:
        readers = [node] if node in interior else [u for u in node.users if u in interior or u in reads]
        if graph.is_tensor(node) and readers:
            memory = graph.storage(node)
            first_read[memory] = min([*readers, *([first_read[memory]] if memory in first_read else [])])
    last = max(interior)
    for node in writes:
        for written in graph.mutated(node):
            first = first_read.get(graph.storage(written)) if graph.is_tensor(written) else None
            if first is not None and first < node < last:
                raise Refused("mutated_between", written.name)


def check_one_grad_mode(interior: Iterable[fx.Node]) -> None:
    if len({node.meta.get("grad") for node in interior}) > 1:
        raise Refused("grad_mode_changes")
