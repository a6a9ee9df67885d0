"""What must hold before a site may be replaced, whatever its kind."""

from collections.abc import Iterable

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.site import Refused

_SIZES_ONLY = {aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset}


def users_that_count(node: fx.Node) -> list[fx.Node]:
    """The users that something comes of; all of them where nothing comes of the node itself."""
    return [user for user in node.users if user.meta["live"] or not node.meta["live"]]


def outside_users(node: fx.Node, interior: Iterable[fx.Node]) -> list[fx.Node]:
    """Users of a node that a rewrite would not replace; asking for a size is no use of the value."""
    return [u for u in node.users if u not in interior and graph.packet(u) not in _SIZES_ONLY and u.meta["live"]]


def mutations(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The calls that write to a tensor."""
    return tuple(node for node in nodes if graph.mutated(node))


def check_not_mutated(writes: tuple[fx.Node, ...], reads: Iterable[fx.Node], interior: Iterable[fx.Node]) -> None:
    """No operand may be written to between the moment the model reads it and the site's last node, where the new call
    reads it, and nothing that the site computes before the site's own last use of it. A view shares the memory of its
    base, so memories are compared, not nodes. writes: the graph's `mutations`.
    """
    interior, reads = set(interior), set(reads)
    writes = tuple(node for node in writes if node not in interior)
    if not writes:
        return
    first: dict[int, fx.Node] = {}
    until: dict[int, fx.Node] = {}
    last = max(interior)
    for node in interior | reads:
        readers = [u for u in node.users if u in interior or u in reads]
        if graph.is_tensor(node) and (readers or node in interior):
            memory = graph.storage(node)
            first[memory] = min([*([node] if node in interior else readers), first.get(memory, last)])
            until[memory] = last if node in reads else max(node, *readers, until.get(memory, node))
    for node in writes:
        for written in graph.mutated(node):
            memory = graph.storage(written) if graph.is_tensor(written) else None
            if memory in first and first[memory] < node < until[memory]:
                raise Refused("mutated_between", written.name)


def check_one_grad_mode(interior: Iterable[fx.Node]) -> None:
    if len({node.meta.get("grad") for node in interior}) > 1:
        raise Refused("grad_mode_changes")
