"""Attention, in whatever spelling: from a softmax back to Q K^T and forward to the product with V."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass import graph
from precisionpass.sites import fused, operands
from precisionpass.sites.anchors import CASTS, SoftmaxAnchor, casts_between, uncast
from precisionpass.sites.axes import VIEWS, Axes, Layout
from precisionpass.sites.contraction import Contraction, contraction
from precisionpass.sites.describe import attention_site
from precisionpass.sites.exponentials import divisor
from precisionpass.sites.legality import check_not_mutated, check_one_grad_mode, outside_users, users_that_count
from precisionpass.sites.reductions import reduction
from precisionpass.sites.scores import LONGEST_WALK, Scores, Walk, carriers, constant_of, walks
from precisionpass.sites.site import Attention, NearMiss, Refused, Site
from precisionpass.sites.zeroed import Zeroing, boolean, exclude, zeroing

_DROPOUT = {aten.dropout, aten.dropout_}
# What no scores come from: a look behind a softmax for a product ends here.
_ENDS = {
    aten.linear, aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d, aten.layer_norm, aten.rms_norm,
    aten.softmax, aten._softmax, aten.scaled_dot_product_attention, aten.embedding,
}  # fmt: skip


def find_attention(
    nodes: tuple[fx.Node, ...], anchors: tuple[SoftmaxAnchor, ...], writes: tuple[fx.Node, ...]
) -> Iterator[Site | NearMiss]:
    """Every attention among the shadow's nodes, and every softmax of a product that is none, with the reason."""
    for node in nodes:
        if graph.packet(node) is aten.scaled_dot_product_attention:
            yield _called(node)
    for anchor in anchors:
        if not anchor.log:
            yield from _around(anchor, writes)


def _called(node: fx.Node) -> Site | NearMiss:
    try:
        return attention_site(fused.read_call(node), frozenset({node}), node, ())
    except Refused as refusal:
        return NearMiss("attention", refusal.reason, node, refusal.detail)


def _around(anchor: SoftmaxAnchor, writes: tuple[fx.Node, ...]) -> Iterator[Site | NearMiss]:
    """The attention around one softmax. Of several possible products the first that fits is the site's."""
    reason, walk = None, None
    for walk in walks(anchor.scores):
        try:
            yield _assemble(anchor, walk, writes)
            return
        except Refused as refusal:
            reason = reason or refusal
    if walk is None and (between := _unknown_before(anchor.scores)) is not None:
        reason = Refused("no_query_key_product", f"{between.name} stands between")
    if reason is not None:
        yield NearMiss("attention", reason.reason, anchor.output, reason.detail)


def _unknown_before(node) -> fx.Node | None:
    """The first operation in front of a softmax that is not followed, where a product lies behind it."""
    pending, seen = [(node, None)], set()
    for node, unknown in pending:
        if len(pending) > LONGEST_WALK or graph.packet(node) in _ENDS:
            continue
        if contraction(node) is not None:
            return unknown
        several = graph.packet(node) is aten.einsum and len(node.args[1]) > 2
        if unknown is None and not carriers(node):
            unknown = node
        if several:
            return unknown
        fresh = [n for n in getattr(node, "all_input_nodes", ()) if graph.is_tensor(n) and n not in seen]
        seen.update(fresh)
        pending += [(read, unknown) for read in fresh]
    return None


@dataclass
class _Probabilities:
    """The probabilities on their way from the softmax to V."""

    node: fx.Node
    layout: Layout
    interior: set[fx.Node] = field(default_factory=set)
    dropout: float = 0.0
    safe: bool = False  # rows of NaN become zeros
    factors: list[tuple[fx.Node, Layout]] = field(default_factory=list)
    zeroed: list[Zeroing] = field(default_factory=list)
    stages: list[tuple[fx.Node, Layout, bool]] = field(default_factory=list)  # with whether dropout has been applied


def _assemble(anchor: SoftmaxAnchor, walk: Walk, writes: tuple[fx.Node, ...]) -> Site:
    axes = Axes()
    product = walk.product
    entries: dict[str, tuple[int, ...]] = {}
    for side, labels in ((product.left, product.left_labels), (product.right, product.right_labels)):
        operands.name_axes(axes, entries, side, labels)
    scores = Scores(axes, tuple(entries.get(label, ()) for label in product.labels))
    scores.scale(product.alpha)
    if product.addend is not None:
        scores.add(product.addend, product.beta)
    for operation, carrier in walk.steps:
        scores.apply(operation, carrier)
    keys = axes.finest(scores.layout[anchor.dim])
    for mask, there in anchor.masks:
        if (bare := boolean(mask)) is None:
            raise Refused("weighted_normaliser")
        scores.exclude(bare, there)
    probabilities = _Probabilities(anchor.output, scores.layout)
    value = _follow_to_values(probabilities, axes, keys, scores.before if scores.sink else None)
    if probabilities.safe and not anchor.native:  # a row of exponentials that all underflow is NaN there, too
        raise Refused("mixed_after_softmax", "numbers for NaN after exponentials written out")
    if anchor.sink is not None:
        scores.take_sink(anchor.sink, keys)
    for each in probabilities.zeroed:
        exclude(scores, each)
    operation = operands.assemble(
        axes,
        entries,
        product,
        scores,
        value,
        probabilities.layout,
        tuple(probabilities.factors),
        keys,
        anchor.safe or probabilities.safe or bool(probabilities.zeroed),
    )
    output, closing = (value.node, set()) if not anchor.unnormalised else _divided(operation, anchor, scores.layout)
    scored = {product.node, *product.inside, *(step for step, _ in walk.steps)}
    interior = {*scored, *anchor.interior, *probabilities.interior, value.node, *value.inside, *closing}
    used = _uses_elsewhere(anchor, probabilities, interior, axes)
    operation = operands.finished(operation, output, probabilities.dropout, used, axes)
    places = [node for o in (operation.q, operation.k, operation.v) for node, _ in o.places]
    reads = [*places, *(n for n, _ in (*operation.reads, *operation.factors))]
    check_not_mutated(writes, reads, interior)
    check_one_grad_mode(interior)
    notes = _removed_casts(walk, probabilities)
    if any(outside_users(node, interior) or "used" in node.meta for node in scored):
        notes += ("the scores are used elsewhere too and stay for that",)
    return attention_site(operation, frozenset(interior), anchor.output, notes, anchor)


def _follow_to_values(p: _Probabilities, axes: Axes, keys: tuple[int, ...], before: int | None) -> Contraction:
    """Walk forward to the product with V; `p` is left at that product's operand.

    before: how many columns of a sink stand before the scores' own, None without a sink.
    """
    found, pending, seen_reason = [], [(p.node, p.layout, False)], None
    paths: dict[fx.Node, _Probabilities] = {p.node: p}
    while pending:
        node, layout, dropped = pending.pop()
        here = paths[node]
        here.stages.append((node, layout, dropped))
        for user in users_that_count(node):
            product = contraction(user) or _summed_product(user)
            if product is not None and node in (product.left, product.right) and product.addend is None:
                found.append((product if node is product.left else product.swapped(), here, node, layout))
                continue
            zero = zeroing(user, node, layout)
            step = (layout, None, 0.0) if zero else _one_step(user, node, layout, axes, before)
            if step is None:
                continue
            if isinstance(step, str):
                seen_reason = step
                continue
            ahead, factor, rate = step
            weights = factor is not None and any(a in keys for dim in axes.layout(factor[1]) for a in dim)
            if weights or (rate and here.dropout):
                seen_reason = "mixed_after_softmax"
                continue
            paths[user] = _Probabilities(
                user,
                ahead,
                here.interior | {user},
                here.dropout or rate,
                here.safe or graph.packet(user) is aten.nan_to_num,
                here.factors + ([factor] if factor else []),
                here.zeroed + ([zero] if zero else []),
                here.stages,
            )
            pending.append((user, ahead, dropped or rate > 0))
    valued = [f for f in found if _contracts(f[0], f[3], axes, keys)]
    if not valued:
        raise Refused("contraction_over_other_axis" if found else seen_reason or "no_value_product")
    # of several the first that is no product with the rows' own: the probabilities are returned for the others
    product, here, node, layout = min(valued, key=lambda f: (_with_rows(f[0], f[3], axes, keys), f[0].node))
    p.node, p.layout, p.dropout, p.safe, p.factors = node, layout, here.dropout, here.safe, here.factors
    p.interior, p.zeroed, p.stages = set(here.interior), here.zeroed, here.stages
    return product


def _summed_product(user: fx.Node) -> Contraction | None:
    """The sum over one dimension of a multiplication with the probabilities."""
    users = users_that_count(user)
    return contraction(users[0]) if graph.packet(user) is aten.mul and len(users) == 1 else None


def _one_step(user: fx.Node, node: fx.Node, layout: Layout, axes: Axes, before: int | None):
    """(layout after, factor, dropout rate) through one operation on the probabilities; a reason; or None."""
    kind = graph.packet(user)
    if kind in CASTS:
        return layout, None, 0.0
    if kind in VIEWS and user.args[0] is node:
        ahead = axes.push(user, layout)
        return "layout_not_followed" if ahead is None else (ahead, None, 0.0)
    if kind in _DROPOUT:
        named = graph.arguments(user)
        return layout, None, float(named["p"]) if named["train"] else 0.0
    if kind is aten.nan_to_num:
        return (layout, None, 0.0) if constant_of(graph.arguments(user)["nan"] or 0) == 0 else "mixed_after_softmax"
    if kind is aten.slice:
        named, sizes = graph.arguments(user), (graph.shape(node), graph.shape(user))
        everything = all(graph.same_size(a, b) for a, b in zip(*sizes, strict=True))
        keys_alone = named["step"] == 1 and int(named["dim"]) % len(layout) == len(layout) - 1
        own = before is not None and keys_alone and (named["start"] or 0) == before
        return (layout, None, 0.0) if everything or own else "mixed_after_softmax"
    if kind in (aten.mul, aten.mul_):
        other = user.args[1] if user.args[0] is node else user.args[0]
        if graph.is_tensor(other):
            try:
                return layout, (other, Scores(axes, layout).aligned(other)), 0.0
            except Refused:
                return "mixed_after_softmax"
    return "mixed_after_softmax" if graph.is_tensor(user) and kind not in (aten.sum, aten.mean) else None


def _contracts(product: Contraction, layout: Layout, axes: Axes, keys: tuple[int, ...]) -> bool:
    """Whether a product with the probabilities as its left operand sums over exactly the keys."""
    if not _fits(product.left, layout, axes):
        return False
    summed = [axes.finest(d) for label, d in zip(product.left_labels, layout, strict=True) if label in product.summed]
    return len(product.summed) >= 1 and tuple(a for dim in summed for a in dim) == keys


def _with_rows(product: Contraction, layout: Layout, axes: Axes, keys: tuple[int, ...]) -> bool:
    """Whether what the probabilities are multiplied with depends on the row: it is no V then."""
    others = [label for label, dim in zip(product.left_labels, layout, strict=True) if axes.finest(dim) != keys and dim]
    return bool(others) and others[-1] in product.right_labels


def _fits(node: fx.Node, layout: Layout, axes: Axes) -> bool:
    """Whether a tensor has its layout's sizes: probabilities that still hold the sink's column do not."""
    return all(axes.size(dim) == graph.expression(s) for dim, s in zip(layout, graph.shape(node), strict=True))


def _divided(operation: Attention, anchor: SoftmaxAnchor, layout: Layout) -> tuple[fx.Node, set[fx.Node]]:
    """The division by the sum that comes after the product with V, where rows meet their own sums."""
    output, axes = operation.output, operation.axes
    users = users_that_count(output)
    for divided, total, calls in divisor(users[0]) if len(users) == 1 else ():
        found = reduction(uncast(total), {aten.sum})
        rows = tuple(() if n == anchor.dim else dim for n, dim in enumerate(layout))
        values = tuple(() if dim == operation.values else dim for dim in operation.output_layout)
        if divided is output and found is not None and found.call is anchor.total and axes.layout(rows) == values:
            return users[0], calls | found.interior | casts_between(total, uncast(total))
    raise Refused("no_value_product", "the sum of exponentials does not divide the product with V")


def _uses_elsewhere(anchor: SoftmaxAnchor, p: _Probabilities, interior: set[fx.Node], axes: Axes):
    """Probabilities that must still be produced: (their nodes with layouts, the stage).

    Scores that are used elsewhere too stay in the graph for that use; the new call does not read them.
    """
    kept, stages = [], set()
    for node, layout, dropped in p.stages:
        if node in interior and (outside_users(node, interior) or "used" in node.meta):
            kept.append((node, layout))
            stages.add("dropped" if dropped else "softmax")
    if not all(_fits(node, layout, axes) for node, layout in kept):
        raise Refused("probabilities_used_elsewhere", "together with the sink's")
    if len(stages) > 1 or (kept and (anchor.unnormalised or p.factors or p.zeroed)):
        raise Refused("probabilities_used_elsewhere")
    return tuple(kept), stages.pop() if stages else "none"


def _removed_casts(walk: Walk, p: _Probabilities) -> tuple[str, ...]:
    casts = [n for n in (*(step for step, _ in walk.steps), *p.interior) if graph.packet(n) in CASTS]
    changing = [n for n in casts if graph.dtype(n) != graph.dtype(n.args[0])]  # type: ignore[arg-type]
    return tuple(sorted({f"cast to {str(graph.dtype(n)).removeprefix('torch.')} removed" for n in changing}))
