"""Softmaxes in every spelling: called by name, and written out as exponentials divided by their sum, now or later."""

from collections.abc import Iterator
from dataclasses import replace

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites.anchors import CASTS, SoftmaxAnchor, casts_between, uncast
from precisionpass.sites.legality import users_that_count
from precisionpass.sites.reductions import reduction
from precisionpass.sites.scores import constant_of

_SOFTMAX = {aten.softmax, aten._softmax, aten.special_softmax, aten._safe_softmax}
_LOG_SOFTMAX = {aten.log_softmax, aten._log_softmax, aten.special_log_softmax}
_LONGEST_SHIFT = 8  # calls between the scores and what is taken away from them


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


def divisor(node: fx.Node) -> Iterator[tuple[object, object, set[fx.Node]]]:
    """(what is divided, by what, the calls) for a / b, a * b.reciprocal() and a * (1 / b)."""
    kind = graph.packet(node)
    if kind is aten.div:
        yield node.args[0], node.args[1], {node}
    if kind is not aten.mul:
        return
    for divided, inverse in (node.args[:2], node.args[1::-1]):
        calls = {node, inverse}
        if graph.packet(inverse) is aten.mul and constant_of(inverse.args[1]) == 1:  # as 1 / x has it
            inverse = inverse.args[0]
            calls.add(inverse)
        if graph.packet(inverse) is aten.reciprocal:
            yield divided, inverse.args[0], calls  # type: ignore[union-attr, misc]


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
    if graph.packet(node) is aten.exp:
        return _by_logarithm(node)
    for exponential, total, calls in divisor(node):
        found = _of_exponential(exponential, total, node, calls)
        if found is not None:
            return found
    return None


def _by_logarithm(node: fx.Node) -> SoftmaxAnchor | None:
    """exp(x - logsumexp(x)), and exp(x - logaddexp(logsumexp(x), sink))."""
    difference = node.args[0]
    if graph.packet(difference) is not aten.sub:
        return None
    scores, normaliser = difference.args[:2]  # type: ignore[union-attr]
    sides = [(normaliser, None)]
    if graph.packet(normaliser) is aten.logaddexp:
        sides = [normaliser.args[:2], normaliser.args[1::-1]]  # type: ignore[union-attr]
    for logarithm, sink in sides:
        found = reduction(logarithm, {aten.logsumexp})
        if found is not None and found.call.args[0] is scores and len(found.dims) == 1:
            interior = found.interior | {node, difference, normaliser}
            return SoftmaxAnchor(scores, node, found.dims[0], frozenset(interior), native=False, sink=sink)  # type: ignore[arg-type]
    return None


def _of_exponential(exponential, total, output: fx.Node, calls: set) -> SoftmaxAnchor | None:
    """The exponential itself, perhaps masked, divided by its sum, to which that of a sink may be added."""
    while graph.packet(total) in (aten.expand, aten.expand_as):
        calls = calls | {total}
        total = total.args[0]
    sides = [(total, None)]
    if graph.packet(total) is aten.add:
        sides = [total.args[:2], total.args[1::-1]]
    for summed, added in sides:
        found = reduction(summed, {aten.sum})
        if found is None or found.of is not uncast(exponential) or len(found.dims) != 1:
            continue
        source, masks, between = _unmasked(exponential)
        if graph.packet(source) is not aten.exp:
            return None
        between |= casts_between(found.call.args[0], found.of) | calls | found.interior | {source}
        anchor = SoftmaxAnchor(
            source.args[0], output, found.dims[0], frozenset(between), native=False, masks=masks  # type: ignore[union-attr]
        )  # fmt: skip
        return anchor if added is None else _with_sink(replace(anchor, interior=anchor.interior | {total}), added)
    return None


def _unmasked(node) -> tuple[object, tuple[tuple[fx.Node, bool], ...], set[fx.Node]]:
    """(the exponential, what makes zeros of it and what that is there, the calls); weights are not yet told apart."""
    masks, calls = [], set()
    while graph.packet(node) is not aten.exp:
        found = (node.args[0], None, None) if graph.packet(node) in CASTS else _one_mask(node)
        if found is None:
            break
        calls.add(node)
        node, mask, there = found
        masks += [] if mask is None else [(mask, there)]
    return node, tuple(masks), calls


def _one_mask(node):
    """e * m, masked_fill(e, m, 0), where(m, e, 0): (what is masked, the mask, what it is where nothing is left)"""
    kind = graph.packet(node)
    if kind is aten.mul and all(map(graph.is_tensor, node.args[:2])):
        first, second = node.args[:2]
        return (first, second, False) if _comes_of_exp(first) else (second, first, False)
    if kind is aten.masked_fill and constant_of(node.args[2]) == 0:
        return node.args[0], node.args[1], True
    if kind is aten.where and constant_of(node.args[2]) == 0:
        return node.args[1], node.args[0], False
    return None


def _comes_of_exp(node) -> bool:
    while graph.packet(node) in CASTS or graph.packet(node) in (aten.mul, aten.masked_fill):
        node = node.args[0]
    return graph.packet(node) is aten.exp


def _with_sink(anchor: SoftmaxAnchor, added) -> SoftmaxAnchor | None:
    """exp(x - m) / (sum(exp(x - m)) + exp(sink - m)), whatever m is: softmax off by one has a sink of 0."""
    if constant_of(added) == 1:
        return replace(anchor, sink=0.0)
    exponent = uncast(added)
    if graph.packet(exponent) is not aten.exp:
        return None
    exponent, difference = exponent.args[0], uncast(anchor.scores)  # type: ignore[union-attr]
    calls = {uncast(added), exponent, difference, *casts_between(added, uncast(added))}
    if graph.packet(difference) is aten.sub:
        scores, shift = difference.args[:2]  # type: ignore[union-attr]
        own = graph.is_tensor(shift) and len(graph.shape(shift)) == len(graph.shape(scores))
        if own and graph.expression(graph.shape(shift)[anchor.dim]) == 1:
            calls |= _between(shift, scores) | casts_between(anchor.scores, difference)
            shiftless = replace(anchor, scores=scores, interior=anchor.interior | calls)  # type: ignore[arg-type]
            if graph.packet(exponent) is aten.neg and exponent.args[0] is shift:  # type: ignore[union-attr]
                return replace(shiftless, sink=0.0)
            if graph.packet(exponent) is aten.sub and exponent.args[1] is shift:  # type: ignore[union-attr]
                return replace(shiftless, sink=exponent.args[0])  # type: ignore[union-attr, arg-type]
    return replace(anchor, sink=exponent, interior=anchor.interior | {uncast(added)})  # type: ignore[arg-type]


def _between(node, source, left: int = _LONGEST_SHIFT) -> set[fx.Node]:
    """The calls from `node` back to, not including, `source`; nothing where it does not come from there."""
    if node is source or left == 0 or not isinstance(node, fx.Node):
        return set()
    ways = [_between(read, source, left - 1) for read in node.all_input_nodes if read is not source]
    if source in node.all_input_nodes or any(ways):
        return {node}.union(*ways)
    return set()


def _late(exponential: fx.Node) -> SoftmaxAnchor | None:
    """exp(x - c) whose sum over one dimension divides something later on."""
    for user in _through_casts(exponential):
        if graph.packet(user) is not aten.sum:
            continue
        kept, last = graph.arguments(user).get("keepdim"), user
        while not kept and (ahead := _only_user(last, aten.unsqueeze)) is not None:
            last = ahead
        found = reduction(last, {aten.sum})
        if found is not None and len(found.dims) == 1:
            interior = frozenset({exponential} | found.interior | casts_between(user.args[0], exponential))
            anchor = SoftmaxAnchor(exponential.args[0], exponential, found.dims[0], interior, native=False, total=user)  # type: ignore[arg-type]
            return _without_shift(anchor)
    return None


def _without_shift(anchor: SoftmaxAnchor) -> SoftmaxAnchor:
    """A softmax does not change when the row's maximum is taken away first: take the scores from before that."""
    scores, interior = anchor.scores, set(anchor.interior)
    bare = uncast(scores)
    if graph.packet(bare) is not aten.sub or anchor.sink is not None:
        return anchor
    before, shift = bare.args[:2]
    largest = uncast(shift)
    if graph.packet(largest) is aten.detach:
        interior.add(largest)
        largest = largest.args[0]
    found = reduction(largest, {aten.amax, aten.max})
    if found is None or found.of is not uncast(before) or found.dims != (anchor.dim,):
        return anchor
    chain = {bare} | found.interior | casts_between(scores, bare) | casts_between(shift, largest)
    return replace(anchor, scores=before, interior=frozenset(interior | chain))


def _only_user(node: fx.Node, kind) -> fx.Node | None:
    users = users_that_count(node)
    return users[0] if len(users) == 1 and graph.packet(users[0]) is kind else None


def _through_casts(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if graph.packet(user) in CASTS:
            yield from _through_casts(user)
        else:
            yield user
