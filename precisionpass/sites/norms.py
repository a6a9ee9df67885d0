"""LayerNorm and RMSNorm, called by name or written out: c / sqrt(statistic + eps), then a weight, then a bias."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites import moments
from precisionpass.sites.anchors import CASTS, casts_between, uncast
from precisionpass.sites.describe import short
from precisionpass.sites.legality import check_not_mutated, outside_users, users_that_count
from precisionpass.sites.moments import Moment
from precisionpass.sites.scores import constant_of
from precisionpass.sites.site import NearMiss, Refused, Rowwise, Site

_ROOTS = {aten.rsqrt: -0.5, aten.sqrt: 0.5}


@dataclass(frozen=True)
class Normalised:
    """A row times 1 / sqrt(statistic + eps): `row` is x itself or x minus its mean."""

    output: fx.Node
    row: fx.Node
    statistic: fx.Node
    eps: object
    interior: frozenset[fx.Node]


def normalised(node: fx.Node) -> Normalised | None:
    """row * rsqrt(v + eps), row / sqrt(v + eps), row * (v + eps) ** -0.5, rsqrt(v) with no eps."""
    kind = graph.packet(node)
    if kind not in (aten.mul, aten.div) or not graph.is_tensor(node):
        return None
    for row, other in (node.args[:2], node.args[1::-1]):
        if kind is aten.div and row is not node.args[0]:
            continue
        root, ones = _without_one(uncast(other))
        if not graph.is_tensor(root) or not graph.is_tensor(row):
            continue
        inside, exponent, between = _root(root)
        if exponent != (0.5 if kind is aten.div else -0.5):
            continue
        statistic, eps = _without_eps(inside)
        interior = {node, *between, *ones, *casts_between(other, uncast(other)), *casts_between(inside, uncast(inside))}
        if eps != 0:
            interior |= {uncast(inside), *casts_between(statistic, uncast(statistic))}
        return Normalised(node, row, uncast(statistic), eps, frozenset(interior))
    return None


def _without_one(node):
    """(the node behind a multiplication with one, as `1 / x` has it, what was passed)"""
    if isinstance(node, fx.Node) and graph.packet(node) is aten.mul and constant_of(node.args[1]) == 1:
        return node.args[0], {node}
    return node, set()


def _root(node: fx.Node):
    """(what the root is taken of, its exponent, the nodes in between)"""
    kind = graph.packet(node)
    if kind in _ROOTS:
        return node.args[0], _ROOTS[kind], {node}
    if kind is aten.pow and constant_of(node.args[1]) in (-0.5, 0.5):
        return node.args[0], constant_of(node.args[1]), {node}
    if kind is aten.reciprocal or (kind is aten.div and constant_of(node.args[0]) == 1):
        root = uncast(node.args[0] if kind is aten.reciprocal else node.args[1])
        if isinstance(root, fx.Node) and graph.packet(root) is aten.sqrt:
            return root.args[0], -0.5, {node, root}
    return None, None, set()


def _without_eps(node):
    bare = uncast(node)
    if isinstance(bare, fx.Node) and graph.packet(bare) is aten.add:
        for statistic, eps in (bare.args[:2], bare.args[1::-1]):
            value = constant_of(eps)
            if value is None and isinstance(eps, fx.Node) and isinstance(graph.value(eps), torch.SymFloat):
                value = eps
            if value is not None and graph.is_tensor(statistic):
                return statistic, value
    return node, 0.0


def find_norms(nodes: tuple[fx.Node, ...], writes: tuple[fx.Node, ...]) -> Iterator[Site | NearMiss]:
    """Every LayerNorm and RMSNorm among the shadow's nodes; near misses with their reasons."""
    for node in nodes:
        kind = graph.packet(node)
        if kind in (aten.layer_norm, aten.rms_norm):
            yield _called(node)
            continue
        found = normalised(node)
        if found is None:
            continue
        try:
            site = _written_out(found, writes)
            if site is not None:
                yield site
        except Refused as refusal:
            yield NearMiss(
                "layer_norm" if moments.variance(found.statistic) else "rms_norm", refusal.reason, node, refusal.detail
            )


def _called(node: fx.Node) -> Site:
    named = graph.arguments(node)
    x, rank = named["input"], len(graph.shape(named["input"]))
    dims = tuple(range(rank - len(named["normalized_shape"]), rank))
    eps = named["eps"]
    kind = "layer_norm" if graph.packet(node) is aten.layer_norm else "rms_norm"
    if eps is None:
        eps = torch.finfo(at_least_fp32(graph.dtype(x))).eps  # of the format that PyTorch computes in
    operation = Rowwise(x, node, dims, named["weight"], named.get("bias"), eps)
    return _site(kind, operation, frozenset({node}), at_least_fp32(graph.dtype(x)))


def _written_out(found: Normalised, writes: tuple[fx.Node, ...]) -> Site | None:
    row = uncast(found.row)
    variance, squares = moments.variance(found.statistic), moments.mean_square(found.statistic)
    centre = moments.centred(row)
    if variance is None and squares is None:
        return None
    if centre is not None and variance is not None:
        kind, moment = "layer_norm", _of_layer_norm(centre, variance)
    elif variance is not None:
        raise Refused("uncentered")
    else:
        assert squares is not None
        kind, moment = "rms_norm", squares
        if centre is not None and centre.dims != squares.dims:
            raise Refused("axes_differ")
        if uncast(squares.of) is not row:
            partial = graph.packet(uncast(squares.of)) is aten.slice and uncast(squares.of).args[0] is row
            raise Refused("partial_norm" if partial else "other_tensor")
    rank = len(graph.shape(found.output))
    if moment.dims != tuple(range(rank - len(moment.dims), rank)) and len(moment.dims) != 1:
        raise Refused("axes_differ", "the normalised dimensions are neither the last ones nor a single one")
    x = uncast(moment.of)
    if _is_group_of(x, moment.dims):
        raise Refused("group_norm")
    interior = found.interior | moment.interior | casts_between(found.row, row) | _casts_inside(moment, x)
    operation = Rowwise(x, found.output, moment.dims, eps=found.eps)
    operation, interior = _with_affine(operation, interior, kind == "rms_norm")
    interior = _without_shared_casts(frozenset(interior - {x}), operation.output)
    check_not_mutated(writes, [x], interior)
    site = _site(kind, operation, interior, _statistics(found))
    if any(outside_users(node, interior) or "used" in node.meta for node in interior - {operation.output}):
        return replace(site, notes=("the statistics are used elsewhere too and stay for that",))
    return site


def _is_group_of(x: fx.Node, dims: tuple[int, ...]) -> bool:
    """Whether x is a view that cuts a row of the viewed tensor into groups, so that statistics cover one of them."""
    if graph.packet(x) not in (aten.view, aten.reshape, aten.unflatten) or not graph.is_tensor(x.args[0]):
        return False
    before, after = graph.shape(x.args[0]), graph.shape(x)  # type: ignore[arg-type]
    width = math.prod(graph.hint(after[d]) for d in dims)
    whole = [math.prod(map(graph.hint, before[n:])) for n in range(len(before))]
    return len(before) >= 3 and width not in whole and width > graph.hint(before[-1])


def _of_layer_norm(centre: Moment, variance: Moment) -> Moment:
    if centre.of is not variance.of:
        raise Refused("other_tensor")
    if centre.dims != variance.dims:
        raise Refused("axes_differ")
    if not variance.biased:
        raise Refused("unbiased_variance")
    return Moment(centre.of, centre.dims, centre.interior | variance.interior)


def _casts_inside(moment: Moment, x: fx.Node) -> set[fx.Node]:
    """Casts of x that the statistics read."""
    read = [argument for node in moment.interior for argument in node.all_input_nodes if uncast(argument) is x]
    return {cast for argument in read for cast in casts_between(argument, x)}


def _without_shared_casts(interior: frozenset[fx.Node], output: fx.Node) -> frozenset[fx.Node]:
    """A cast (perhaps of nothing: FP32 to FP32) that others read as well simply stays."""
    shared = {n for n in interior if n is not output and graph.packet(n) in CASTS and outside_users(n, interior)}
    return _without_shared_casts(interior - shared, output) if shared else interior


def _with_affine(operation: Rowwise, interior, rms: bool):
    """Take in a weight of the normalised shape (of an RMS norm also 1 + weight), and then a bias, while nothing else
    reads between.
    """
    for kind in (aten.mul, aten.add):
        ahead, casts = _next(operation.output)
        if ahead is None or graph.packet(ahead) is not kind:
            continue
        other = ahead.args[1] if ahead.args[0] in (operation.output, *casts) else ahead.args[0]
        offset = 0.0
        bare = uncast(other)
        if (
            kind is aten.mul
            and rms
            and graph.is_tensor(bare)
            and graph.packet(bare) is aten.add
            and constant_of(bare.args[1]) == 1
        ):
            offset, other = 1.0, bare.args[0]
        if not graph.is_tensor(other) or not _is_row_shaped(uncast(other), operation):
            continue
        if kind is aten.mul:
            operation = replace(operation, output=ahead, weight=uncast(other), weight_offset=offset)
        else:
            operation = replace(operation, output=ahead, bias=uncast(other))
        interior = interior | {ahead, *casts}
    ahead, casts = _next(operation.output)
    if ahead is None and casts:
        operation, interior = replace(operation, output=casts[-1]), interior | set(casts)
    return operation, interior


def _next(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The only live user behind casts, and the casts. None where there are several."""
    casts: list[fx.Node] = []
    while True:
        users = users_that_count(node)
        if len(users) != 1 or "used" in node.meta:
            return None, casts
        if graph.packet(users[0]) not in CASTS:
            return users[0], casts
        node = users[0]
        casts.append(node)


def _is_row_shaped(node: fx.Node, operation: Rowwise) -> bool:
    row = graph.shape(operation.x)
    expected = [row[d] for d in operation.dims]
    shape = graph.shape(node)
    last = operation.dims[-1] == len(row) - 1
    return (
        last
        and len(shape) == len(expected)
        and all(graph.same_size(a, b) for a, b in zip(shape, expected, strict=True))
    )


def _statistics(found: Normalised) -> torch.dtype:
    return graph.dtype(found.statistic)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """A native norm of a 16-bit tensor accumulates in FP32."""
    return torch.promote_types(dtype, torch.float32)


def _site(kind: str, operation: Rowwise, interior: frozenset[fx.Node], statistics: torch.dtype) -> Site:
    shape = graph.shape(operation.x)
    width = 1
    for d in operation.dims:
        width = width * graph.expression(shape[d])
    eps = operation.eps if isinstance(operation.eps, int | float) else 0.0
    facts = {
        "dtype": short(graph.dtype(operation.x)),
        "device": graph.value(operation.output).device.type,
        "statistics": short(statistics),
        "width": width,
        "eps": float(eps),
    }
    scale = "" if operation.weight is None else " * w" if not operation.weight_offset else " * (1 + w)"
    row, statistic = ("x - mean(x)", "var(x)") if kind == "layer_norm" else ("x", "mean(x^2)")
    formula = f"({row}) / sqrt({statistic} + {facts['eps']:g}){scale}{' + b' if operation.bias is not None else ''}"
    return Site(kind, operation, interior, facts, formula, operation.output)
