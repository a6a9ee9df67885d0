"""LayerNorm and RMSNorm, called by name or written out: c / sqrt(statistic + eps), then a weight, then a bias."""

import math
from dataclasses import replace

import torch
from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites import moments
from precisionpass.sites.anchors import CASTS, casts_between, uncast
from precisionpass.sites.describe import short
from precisionpass.sites.legality import check_not_mutated, outside_users, users_that_count
from precisionpass.sites.moments import Moment
from precisionpass.sites.roots import Normalised, normalised
from precisionpass.sites.scores import constant_of
from precisionpass.sites.site import NearMiss, Refused, Rowwise, Site


def find_norms(nodes: tuple[fx.Node, ...], writes: tuple[fx.Node, ...]) -> list[Site | NearMiss]:
    """Every LayerNorm and RMSNorm among the shadow's nodes; near misses with their reasons."""
    found = [item for node in nodes if (item := _norm(node, writes)) is not None]
    inside = {node for site in found if isinstance(site, Site) for node in site.interior}
    return [item for item in found if isinstance(item, Site) or item.anchor not in inside]


def _norm(node: fx.Node, writes: tuple[fx.Node, ...]) -> Site | NearMiss | None:
    """The norm whose last call, but for a weight and a bias, is this one. The first reason of several counts."""
    if graph.packet(node) in (aten.layer_norm, aten.rms_norm):
        return _called(node)
    miss = None
    for found in normalised(node):
        try:
            site = _written_out(found, writes)
        except Refused as refusal:
            kind = "layer_norm" if _statistics_of(found)[0] else "rms_norm"
            miss = miss or NearMiss(kind, refusal.reason, node, refusal.detail)
            continue
        if site is not None:
            return site
    return miss


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


def _statistics_of(found: Normalised) -> tuple[Moment | None, Moment | None]:
    """(the variance, the mean square) that the root is of; one of them at most of a plain row."""
    root = found.root
    if root.is_statistic:
        return moments.deviation(root.statistic, root.put_back), moments.root_mean_square(root.statistic, root.put_back)
    return moments.variance(root.statistic, root.put_back), moments.mean_square(root.statistic, root.put_back)


def _written_out(found: Normalised, writes: tuple[fx.Node, ...]) -> Site | None:
    variance, squares = _statistics_of(found)
    if variance is None and squares is None:
        length = moments.square_sum(found.root.statistic, found.root.put_back)
        if length is not None and length.of is uncast(found.row):
            raise Refused("l2_normalise")
        return None
    row, weight, inside = _without_weight(found, variance, squares)
    centre = moments.centred(row)
    if centre is not None and variance is not None:
        kind, moment = "layer_norm", _of_layer_norm(centre, variance)
    elif variance is not None:
        raise Refused("uncentered")
    else:
        assert squares is not None
        kind, moment = "rms_norm", squares
        if centre is not None and centre.dims != squares.dims:
            raise Refused("axes_differ")
        if squares.of is not row:
            partial = graph.packet(squares.of) is aten.slice and squares.of.args[0] is row
            raise Refused("partial_norm" if partial else "other_tensor")
    if found.root.outside:
        raise Refused("eps_outside_root")
    rank = len(graph.shape(found.output))
    if moment.dims != tuple(range(rank - len(moment.dims), rank)) and len(moment.dims) != 1:
        raise Refused("axes_differ", "the normalised dimensions are neither the last ones nor a single one")
    x = moment.of
    if _is_group_of(x, moment.dims):
        raise Refused("group_norm")
    interior = found.root.interior | inside | moment.interior | _casts_inside(moment, x)
    operation = Rowwise(x, found.output, moment.dims, eps=found.root.eps)
    if weight is not None:
        weight, offset = _weight(weight, operation, kind == "rms_norm")
        if weight is None and found.weight is not None:
            return None
        if weight is None:
            raise Refused("other_tensor", "the weight is not one of the normalised dimensions")
        operation = replace(operation, weight=weight, weight_offset=offset)
    operation, interior = _with_affine(operation, interior, kind == "rms_norm")
    interior = _without_shared_casts(frozenset(interior - {x}), operation.output)
    check_not_mutated(writes, [x], interior)
    site = _site(kind, operation, interior, graph.dtype(found.root.statistic))  # type: ignore[arg-type]
    if any(outside_users(node, interior) or "used" in node.meta for node in interior - {operation.output}):
        return replace(site, notes=("the statistics are used elsewhere too and stay for that",))
    return site


def _without_weight(found: Normalised, variance: Moment | None, squares: Moment | None):
    """(the row, its weight, the calls in between): the weight may be multiplied into the row or the inverse root."""
    row = uncast(found.row)
    inside = casts_between(found.row, row)
    if found.weight is None and graph.packet(row) is aten.mul:
        for side, weight in (row.args[:2], row.args[1::-1]):
            bare = uncast(side)
            centre = moments.centred(bare)
            own = (squares and squares.of is bare) or (variance and centre and centre.of is variance.of)
            if own and graph.is_tensor(weight):
                return bare, weight, inside | {row} | casts_between(side, bare)
    return row, found.weight, inside


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
        weight, offset = _weight(other, operation, rms and kind is aten.mul)
        if weight is None or (kind is aten.mul and operation.weight is not None):
            continue
        if kind is aten.mul:
            operation = replace(operation, output=ahead, weight=weight, weight_offset=offset)
        else:
            operation = replace(operation, output=ahead, bias=weight)
        interior = interior | {ahead, *casts}
    ahead, casts = _next(operation.output)
    if ahead is None and casts:
        operation, interior = replace(operation, output=casts[-1]), interior | set(casts)
    return operation, interior


def _weight(node, operation: Rowwise, may_count_from_one: bool) -> tuple[fx.Node | None, float]:
    """(a tensor of the normalised shape or None, what is added to it: 0, or 1 where 1 + weight stands)"""
    offset, bare = 0.0, uncast(node)
    if may_count_from_one and graph.packet(bare) is aten.add and constant_of(bare.args[1]) == 1:
        offset, bare = 1.0, uncast(bare.args[0])
    return (bare, offset) if graph.is_tensor(bare) and _is_row_shaped(bare, operation) else (None, 0.0)  # type: ignore[return-value]


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
