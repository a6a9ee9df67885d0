"""Softmax in every spelling: the anchors that attention and lone softmaxes are found from."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph

CASTS = {aten.to, aten._to_copy, aten.type_as}
_SOFTMAX = {aten.softmax, aten._softmax, aten.special_softmax, aten._safe_softmax}
_LOG_SOFTMAX = {aten.log_softmax, aten._log_softmax, aten.special_log_softmax}
_LARGEST = {aten.amax, aten.max}


@dataclass(frozen=True)
class SoftmaxAnchor:
    """A softmax (or log_softmax) of `scores` over dimension `dim`, computing `output`.

    `unnormalised`: `output` is exp(scores) and the division by `total`, its sum, comes later.
    """

    scores: fx.Node
    output: fx.Node
    dim: int
    interior: frozenset[fx.Node]
    log: bool = False
    native: bool = True
    safe: bool = False
    total: fx.Node | None = None

    @property
    def unnormalised(self) -> bool:
        return self.total is not None

    @property
    def statistics(self) -> torch.dtype:
        """What maximum and sum are computed in: at least FP32 inside a native softmax."""
        own = graph.dtype(self.output)
        return own if not self.native or own == torch.float64 else torch.float32


def softmaxes(nodes) -> Iterator[SoftmaxAnchor]:
    """Every softmax and log_softmax among the shadow's nodes, in order, each once."""
    used: set[fx.Node] = set()
    found = [anchor for node in nodes if (anchor := _native(node) or _written_out(node)) is not None]
    for anchor in found:
        if anchor.log and (exponential := _only_user(anchor.output, aten.exp)) is not None:
            anchor = SoftmaxAnchor(anchor.scores, exponential, anchor.dim, anchor.interior | {exponential})
        used |= anchor.interior
        yield _without_shift(anchor)
    for node in nodes:
        if graph.packet(node) is aten.exp and node not in used and (anchor := _late(node)) is not None:
            yield anchor


def uncast(node):
    """The node behind casts, or the node itself."""
    while isinstance(node, fx.Node) and graph.packet(node) in CASTS:
        node = node.args[0]
    return node


def _native(node: fx.Node) -> SoftmaxAnchor | None:
    kind = graph.packet(node)
    if kind not in _SOFTMAX | _LOG_SOFTMAX or not graph.is_tensor(node):
        return None
    scores = node.args[0]
    rank = len(graph.shape(scores))  # type: ignore[arg-type]
    dim = int(node.args[1]) % max(rank, 1)  # type: ignore[arg-type]
    return SoftmaxAnchor(scores, node, dim, frozenset({node}), kind in _LOG_SOFTMAX, safe=kind is aten._safe_softmax)  # type: ignore[arg-type]


def _written_out(node: fx.Node) -> SoftmaxAnchor | None:
    """exp(x - c) / sum(exp(x - c)), and exp(x - logsumexp(x))."""
    kind = graph.packet(node)
    if kind is aten.exp and graph.packet(node.args[0]) is aten.sub:  # type: ignore[arg-type]
        scores, normaliser = node.args[0].args[:2]  # type: ignore[union-attr]
        if (
            isinstance(normaliser, fx.Node)
            and graph.packet(normaliser) is aten.logsumexp
            and normaliser.args[0] is scores
        ):
            dim = _reduced(normaliser)
            if dim is not None:
                return SoftmaxAnchor(scores, node, dim, frozenset({node, node.args[0], normaliser}), native=False)  # type: ignore[arg-type]
        return None
    if kind is aten.div:
        exponential, total = node.args[:2]
        extra = {node}
    elif kind is aten.mul and any(graph.packet(a) is aten.reciprocal for a in node.args if isinstance(a, fx.Node)):
        exponential, inverse = node.args if graph.packet(node.args[1]) is aten.reciprocal else node.args[::-1]  # type: ignore[arg-type]
        total, extra = inverse.args[0], {node, inverse}  # type: ignore[union-attr]
    else:
        return None
    return _of_exponential(exponential, total, node, extra)


def _of_exponential(exponential, total, output: fx.Node, extra: set) -> SoftmaxAnchor | None:
    if not isinstance(total, fx.Node):
        return None
    expanded = total
    while graph.packet(expanded) in (aten.expand, aten.expand_as):
        extra.add(expanded)
        expanded = expanded.args[0]
    if graph.packet(expanded) is not aten.sum or uncast(expanded.args[0]) is not uncast(exponential):
        return None
    source = uncast(exponential)
    dim = _reduced(expanded)
    if graph.packet(source) is not aten.exp or dim is None:
        return None
    between = casts_between(exponential, source) | casts_between(expanded.args[0], source)
    interior = frozenset(extra | {expanded, source} | between)
    return SoftmaxAnchor(source.args[0], output, dim, interior, native=False)  # type: ignore[union-attr]


def _late(exponential: fx.Node) -> SoftmaxAnchor | None:
    """exp(x - c) whose sum over one dimension divides something later on."""
    for user in _through_casts(exponential):
        dim = _reduced(user) if graph.packet(user) is aten.sum else None
        if dim is not None:
            interior = frozenset({exponential, user} | casts_between(user.args[0], exponential))
            anchor = SoftmaxAnchor(exponential.args[0], exponential, dim, interior, native=False, total=user)  # type: ignore[arg-type]
            return _without_shift(anchor)
    return None


def _without_shift(anchor: SoftmaxAnchor) -> SoftmaxAnchor:
    """A softmax does not change when the row's maximum is taken away first: take the scores from before that."""
    scores, interior = anchor.scores, set(anchor.interior)
    bare = uncast(scores)
    if graph.packet(bare) is not aten.sub:
        return anchor
    before, shift = bare.args[:2]
    largest = uncast(shift)
    if graph.packet(largest) is aten.detach:
        interior.add(largest)
        largest = largest.args[0]
    chain = {bare, largest} | casts_between(scores, bare) | casts_between(shift, largest)
    if graph.packet(largest) is operator.getitem:
        chain.add(largest.args[0])
        largest = largest.args[0]
    if graph.packet(largest) not in _LARGEST or uncast(largest.args[0]) is not uncast(before):
        return anchor
    if _reduced(largest) != anchor.dim:
        return anchor
    return replace(anchor, scores=before, interior=frozenset(interior | chain))


def _reduced(node: fx.Node) -> int | None:
    """The one dimension that a reduction runs over, kept with size one; None otherwise."""
    named = graph.arguments(node)
    dims = named.get("dim", named.get("self"))
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or len(dims) != 1 or not named.get("keepdim"):
        return None
    return int(dims[0]) % len(graph.shape(node.args[0]))  # type: ignore[arg-type]


def _only_user(node: fx.Node, kind) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and graph.packet(users[0]) is kind else None


def _through_casts(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if graph.packet(user) in CASTS:
            yield from _through_casts(user)
        else:
            yield user


def casts_between(outer, inner) -> set[fx.Node]:
    """The casts from `outer` down to, not including, `inner`."""
    found = set()
    while outer is not inner and isinstance(outer, fx.Node) and graph.packet(outer) in CASTS:
        found.add(outer)
        outer = outer.args[0]
    return found
