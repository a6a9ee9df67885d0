"""From what a user's recogniser found to a site, with the legality that every site has."""

from collections.abc import Iterator

from torch import fx

from precisionpass import graph
from precisionpass.sites.describe import short
from precisionpass.sites.legality import check_not_mutated, check_one_grad_mode, outside_users
from precisionpass.sites.recogniser import Found, Recogniser, Search, wrong_recogniser
from precisionpass.sites.site import NearMiss, Own, Refused, Site

PLAIN = bool | int | float | str | None


def find_own(recogniser: Recogniser, search: Search) -> Iterator[Site | NearMiss]:
    """The sites of a user's recogniser, or why they are none. Raises PrecisionPassError for what is its fault."""
    kind = recogniser.kind
    try:
        everything = list(recogniser.find(search))
    except Exception as error:
        raise wrong_recogniser(kind, f"{type(error).__name__}: {error}", "failed") from error
    for found in everything:
        _check(kind, found, search)
        try:
            yield _site(kind, found, search)
        except Refused as refusal:
            yield NearMiss(kind, refusal.reason, found.output, refusal.detail)


def _check(kind: str, found: object, search: Search) -> None:
    if not isinstance(found, Found):
        raise wrong_recogniser(kind, f"find gave a {type(found).__name__}")
    known = set(search.nodes)
    if not graph.is_tensor(found.output) or found.output not in known:
        raise wrong_recogniser(kind, "an output is no tensor of the graph")
    if not isinstance(found.inputs, tuple):
        raise wrong_recogniser(kind, f"inputs is a {type(found.inputs).__name__}, not a tuple")
    for given in found.inputs:
        if isinstance(given, fx.Node) and (given not in known or not given < found.output):
            raise wrong_recogniser(kind, f"the input {given} does not come before the output {found.output}")
        if not isinstance(given, fx.Node | PLAIN):
            raise wrong_recogniser(kind, f"an input is a {type(given).__name__}, neither a node nor a plain value")


def _site(kind: str, found: Found, search: Search) -> Site:
    inputs = [given for given in found.inputs if isinstance(given, fx.Node)]
    interior = _between(kind, inputs, found.output)
    for node in sorted(interior):
        if graph.is_mutable(node):
            raise Refused("mutated_between", node.name)
        if node is not found.output and ("used" in node.meta or outside_users(node, interior)):
            raise Refused("used_elsewhere", node.name)
    check_not_mutated(search.writes, inputs, interior)
    check_one_grad_mode(interior)
    first = next(filter(graph.is_tensor, inputs), found.output)
    facts = {"dtype": short(graph.dtype(first)), "device": graph.value(found.output).device.type}
    formula = found.formula or f"{kind}({', '.join(str(given) for given in found.inputs)})"
    return Site(kind, Own(found.inputs, found.output), interior, facts | dict(found.facts), formula, found.output)


def _between(kind: str, inputs: list[fx.Node], output: fx.Node) -> frozenset[fx.Node]:
    """Every call from the inputs to the output."""
    interior: set[fx.Node] = set()
    pending = [output]
    while pending:
        node = pending.pop()
        if node in interior or node in inputs:
            continue
        if node.op != "call_function":
            raise wrong_recogniser(kind, f"the output {output} is computed from {node}, which is not among the inputs")
        interior.add(node)
        pending += node.all_input_nodes
    return frozenset(interior)
