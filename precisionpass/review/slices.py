"""One site alone: the calls that compute it before and after the rewrite, from the same inputs."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from precisionpass import graph
from precisionpass.review.code import names_of
from precisionpass.review.report import Call, Calls
from precisionpass.review.spelling import Speller, Unwritable, type_of

MOST_CALLS = 120  # further back than this nothing is followed
VIEWS_FOLLOWED = 4


@dataclass(frozen=True)
class Piece:
    """A part of a graph, in its order: what it reads, what it calls, and which of that others read."""

    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def before(whole: fx.Graph, outputs: Sequence[str], interior: Collection[str], read: Collection[str]) -> Piece | None:
    """The site as it was: from `outputs` back to what the new calls read, and, where they read nothing of a branch
    (a mask that is known by now), back to where it begins. read: names; empty: back to the edge of the site.

    None where an output is no longer there.
    """
    nodes = {node.name: node for node in whole.nodes}
    if not all(name in nodes for name in outputs):
        return None
    ends = [nodes[name] for name in outputs]
    found = _back(whole, ends, lambda node: node.name in read) if read else None
    if found is None or len(found) > MOST_CALLS:
        found = _back(whole, ends, lambda node: node.name not in interior or node.name in read)
    return _piece(whole, found, ends)


def after(whole: fx.Graph, outputs: Sequence[fx.Node], old: Collection[str]) -> Piece:
    """The new calls of a site: from `outputs` back to what was there before."""
    return _piece(whole, _back(whole, list(outputs), lambda node: node.name in old), list(outputs))


def site_calls(old: Piece, new: Piece | None, interior: Collection[str]) -> Calls:
    """What a drawing shows: the calls of the site itself before, from where the new calls begin, and the new calls."""
    if new is None:
        return Calls(_calls(old, interior))
    begin = {node.name for node in new.inputs}
    part = set(interior)
    for node in old.calls:
        if any(read.name in begin or (read in old.calls and read.name in part) for read in node.all_input_nodes):
            part.add(node.name)
    return Calls(_calls(old, part), _calls(new))


def _calls(piece: Piece, part: Collection[str] | None = None) -> tuple[Call, ...]:
    """A piece as plain data, what it reads first. part: only these calls, where given."""
    names = names_of([*piece.inputs, *piece.calls])
    speller = Speller(names)
    shown = [node for node in piece.calls if part is None or node.name in part]
    read = dict.fromkeys(n for node in shown for n in node.all_input_nodes if n not in shown)
    return (
        *(Call(names[node], "", type_of(node)) for node in sorted(read)),
        *(_call(node, speller) for node in shown),
    )


def _call(node: fx.Node, speller: Speller) -> Call:
    reads = tuple(speller.names[n] for n in node.all_input_nodes)
    try:
        return Call(speller.names[node], speller.call(node), type_of(node), reads, *speller.label(node))
    except Unwritable as problem:
        return Call(speller.names[node], f"({problem})", type_of(node), reads, str(problem))


def _back(whole: fx.Graph, ends: list[fx.Node], stops: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What the ends are computed from. A call that writes into any of it counts too, though nothing may read it."""
    found: set[fx.Node] = set()
    pending = [node for node in ends if not stops(node)]
    while pending:
        while pending:
            node = pending.pop()
            if node in found or node.op in ("placeholder", "get_attr"):
                continue
            found.add(node)
            pending += [read for read in node.all_input_nodes if not stops(read)]
        last = max(found, default=None)
        pending = [n for n in _until(whole, last) if n not in found and _writes(n) and _written(n, found)]
    return found


def _until(whole: fx.Graph, last: fx.Node | None) -> Iterator[fx.Node]:
    return itertools.takewhile(lambda node: node is not last, whole.nodes)


def _written(node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a call in place writes into one of these, directly or through a view of it."""
    written = node.args[0] if node.args else None
    for _ in range(VIEWS_FOLLOWED):
        if not isinstance(written, fx.Node) or written in found:
            break
        written = written.args[0] if written.args else None
    return written in found


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return graph.is_mutable(node) or in_place or name == "setitem" or (name[:1] == "i" and name[1:] in _IN_PLACE)


_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")


def _piece(whole: fx.Graph, found: set[fx.Node], ends: list[fx.Node]) -> Piece:
    ordered = [node for node in whole.nodes if node in found]
    read = {n for node in ordered for n in node.all_input_nodes if n not in found}
    return Piece(tuple(n for n in whole.nodes if n in read), tuple(ordered), tuple(ends))


def autocast_around(whole: fx.Graph, node: fx.Node) -> Iterator[str]:
    """The autocast regions that a node lies in, outermost first, as the expressions that enter them."""
    open_: dict[fx.Node, str] = {}
    for earlier in whole.nodes:
        if earlier is node:
            break
        name = getattr(earlier.target, "__name__", "")
        if name == "_enter_autocast":
            device, dtype, enabled, *_ = earlier.args
            open_[earlier] = f"torch.autocast({str(device)!r}, dtype={dtype}, enabled={enabled})"
        elif name == "_exit_autocast":
            open_.pop(earlier.args[0], None)  # type: ignore[arg-type]
    yield from open_.values()
