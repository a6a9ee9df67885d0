"""What finding a site gives: plain values about nodes of the shadow, never about a kernel or a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from precisionpass.sites.axes import Axes, Layout

KINDS = ("attention", "softmax", "log_softmax", "layer_norm", "rms_norm")

# Reason codes of near misses: stable, each with its meaning in words.
REASONS = {
    "no_query_key_product": "the scores are not a product of queries and keys",
    "softmax_over_other_axis": "the softmax runs over another axis than the keys",
    "contraction_over_other_axis": "the probabilities meet V over another axis than the softmax's",
    "mixed_after_softmax": "something other than a cast, dropout or a factor stands between the softmax and V",
    "no_value_product": "the probabilities are not multiplied by values",
    "weighted_normaliser": "the exponentials are weighted, not only masked, before they are summed",
    "scores_used_elsewhere": "the scores before the softmax are used elsewhere too",
    "probabilities_used_elsewhere": "the probabilities are used elsewhere, at more than one stage",
    "mutated_between": "a tensor of the site is changed in place in between",
    "grad_mode_changes": "gradients are switched on or off inside the site",
    "scores_are_broadcast": "the scores are repeated along a new axis by what is added to them",
    "layout_not_followed": "a reshape in between cannot be followed through symbolic sizes",
    "unbiased_variance": "the variance is the unbiased one (divided by n - 1)",
    "partial_norm": "the statistics cover a part of the row only",
    "other_tensor": "the statistics come from another tensor than the one that is normalised",
    "eps_outside_root": "eps is added outside the root",
    "axes_differ": "mean and variance run over different axes",
    "uncentered": "the row is divided by its standard deviation without its mean taken away",
    "used_elsewhere": "a value inside the site is used elsewhere too",
    "part_of_other_site": "a site that was recognised earlier holds a part of it",
    "group_norm": "a group norm: statistics over groups of channels",
    "l2_normalise": "a row divided by its length, not by its root mean square",
}


@dataclass(frozen=True)
class Operand:
    """A tensor that a site reads: the places where it can be taken from, nearest first, each with its layout."""

    places: tuple[tuple[fx.Node, Layout], ...]
    dtype: torch.dtype  # at the product, in front of any cast that the places reach behind


@dataclass(frozen=True)
class Band:
    """Row i sees key j where low <= j - i <= high; None is no bound."""

    low: int | None = None
    high: int | None = None

    @property
    def everything(self) -> bool:
        return self.low is None and self.high is None


@dataclass(frozen=True)
class Attention:
    """O = dropout(softmax(score(Q K^T))) V, with every tensor's layout in terms of one set of axes."""

    axes: Axes
    q: Operand
    k: Operand
    v: Operand
    batch: tuple[int, ...]  # axes of the batch
    kv_heads: tuple[int, ...]  # axes of the heads that keys and values have
    group: tuple[int, ...]  # axes of the query heads that share a key head
    rows: tuple[int, ...]  # query positions
    keys: tuple[int, ...]  # key positions
    inner: tuple[int, ...]  # what Q K^T sums over
    values: tuple[int, ...]  # width of a value
    score: sympy.Expr
    reads: tuple[tuple[fx.Node, Layout], ...]  # tensors t0, t1, ... of the score expression
    numbers: Mapping[str, fx.Node]  # symbolic numbers c0, c1, ... of the score expression
    factors: tuple[tuple[fx.Node, Layout], ...]  # multiply the output (head masks)
    output: fx.Node
    output_layout: Layout
    product_dtype: torch.dtype  # in which Q K^T is computed, autocast included
    value_dtype: torch.dtype  # in which P V is computed
    safe_softmax: bool = False  # dead rows give 0 rather than NaN
    sink: tuple[fx.Node | float, Layout] | None = None  # an extra logit a row without a value; several in the last dim
    band: Band = Band()  # keys that a row may see by position
    dropout: float = 0.0
    probabilities: tuple[tuple[fx.Node, Layout], ...] = ()  # probabilities that are used elsewhere
    probabilities_stage: str = "none"  # none | softmax | dropped


@dataclass(frozen=True)
class Rowwise:
    """A softmax or a norm: one tensor in, one out, statistics over some dimensions."""

    x: fx.Node
    output: fx.Node
    dims: tuple[int, ...]
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    eps: object = 0.0
    weight_offset: float = 0.0


@dataclass(frozen=True)
class Own:
    """What a recogniser of the user's found: an action gets `inputs`, nodes or plain values, and gives `output`."""

    inputs: tuple[object, ...]
    output: fx.Node


@dataclass(frozen=True)
class Site:
    """A place of the shadow that is attention, a softmax, a norm, or of a kind of the user's own."""

    kind: str
    operation: Attention | Rowwise | Own
    interior: frozenset[fx.Node]  # shadow nodes that a rewrite replaces
    facts: Mapping[str, object]
    formula: str
    anchor: fx.Node
    notes: tuple[str, ...] = field(default=())

    @property
    def output(self) -> fx.Node:
        return self.operation.output


@dataclass(frozen=True)
class NearMiss:
    """Almost a site of this kind: why it is none, and where."""

    kind: str
    reason: str
    anchor: fx.Node
    detail: str = ""

    @property
    def message(self) -> str:
        return REASONS[self.reason] + (f" ({self.detail})" if self.detail else "")


class Refused(Exception):
    """Raised inside a recogniser to leave it with a reason; never leaves `sites`."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail
