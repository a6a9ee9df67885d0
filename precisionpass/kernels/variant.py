"""What one compiled attention kernel is specialised for, and the small bundles of numbers that its launch carries."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """Everything the kernels decide at compile time. Two launches with equal variants and tiles share one binary.

    head_dim, value_dim: true widths of a row of Q and K, and of V and O.
    width, value_width:  the same, padded to a power of two; columns past the true width read as zero.
    descriptors:         tiles are moved by tensor descriptors (TMA); else by pointers with any strides.
    whole_queries, whole_keys: the length is a multiple of the kernel's tile: no tail block is compiled.
    right_bound, left_bound: keys after (causal, window) or before (window) a row's diagonal are excluded.
    fused_scale:         the scale multiplies inside the exponent; only where nothing stands between Q K^T and softmax.
    apart:               the backward takes the blocks at the diagonal in a loop of their own, not by a branch.
    surveyed:            the mask comes as bits, with the kind of each block (mask_survey.py).
    together:            sequences share a large bias: neighbouring programs take them, so that it is read once.
    score:               the jit function of a score expression and its slopes (score_code.py).
    rounded_normaliser:  the row sum adds the 16-bit P that multiplies V (NUMERICS 3), by a product with ones.
    precise_log_sum:     the log-sum-exp comes from a sum of the unrounded P beside it; in training from the rounded
                         sum, within 2^-8: one factor for a row of P in the backward, where it cancels.
    two_level:           each block's products start from zero and are added by rounding FP32 additions, not truncating.
    deferred:            a block's P V is added during the next Q K^T.
    ones_width:          columns of ones in that product.
    dead_rows:           some row may have no key; dead_rows_nan: its output is NaN, not 0.
    row_max_shift:       rows whose maximum repeats are shifted above it (shifts.py).
    output_clip:         O is bounded before it is rounded.
    exact:               FP32 inputs: products in full FP32, P is never rounded.
    log_sum_gradient:    a gradient arrives through the returned log-sum-exp.
    probability_gradient: one arrives through the returned probabilities: "softmax", or "dropped", after dropout.
    packed:              the sequences stand one after the other (sequences.py); bottom_right: rows of each are aligned
                         at its end. Dense batches leave both False: their diagonal is a number.
    row_sums:            the kernel of dQ leaves rowsum dS of each row and, with `makes_rows`, rowsum |dO * O|.
    makes_rows:          the kernel of dQ, which runs first, makes delta and shift; else `prepare_rows` has.
    qk_exponent, pv_exponent: the product is FP8, whose largest number is 1.75 * 2^this (fp8.py); 0: it is not.
    fp8_scale:           "head" (or tensor), "row" or "block": what has a scale of its own.
    dtype, probability_dtype: Triton's formats of O, and of the P that multiplies V.
    split:               a program takes a part of a row's keys only, and leaves its FP32 output to be combined.
    """

    head_dim: int
    value_dim: int
    width: int
    value_width: int
    descriptors: bool = False
    whole_queries: bool = False
    whole_keys: bool = False
    grouped: bool = False
    right_bound: bool = False
    left_bound: bool = False
    fused_scale: bool = True
    score: Any = None
    softcap: bool = False
    logit_clip: str = "none"
    bias: bool = False
    bias_varies_by_query: bool = False
    bias_varies_by_key: bool = False
    together: bool = False
    mask: bool = False
    mask_varies_by_query: bool = False
    mask_varies_by_key: bool = False
    apart: bool = False
    surveyed: bool = False
    sinks: bool = False
    dropout: bool = False
    rounded_normaliser: bool = True
    precise_log_sum: bool = True
    two_level: bool = True
    deferred: bool = False
    ones_width: int = 16
    residual: bool = False
    residual_descriptor: bool = False
    row_max: bool = False
    row_max_shift: bool = False
    output_clip: bool = False
    dead_rows: bool = False
    dead_rows_nan: bool = False
    exact: bool = False
    log_sum_gradient: bool = False
    probability_gradient: str = "none"
    packed: bool = False
    bottom_right: bool = False
    row_sums: bool = False
    makes_rows: bool = False
    qk_exponent: int = 0
    pv_exponent: int = 0
    fp8_scale: str = "head"
    dtype: Any = None
    probability_dtype: Any = None
    split: bool = False

    @property
    def branches_by_mask(self) -> bool:
        """Whether a block that the mask allows whole skips it; beside dropout the branch costs layouts and spills."""
        return self.surveyed and not self.dropout

    @property
    def bounded(self) -> bool:
        """Whether some block of keys needs the test of `masks.inside`."""
        return self.right_bound or self.left_bound or not self.whole_keys

    @property
    def placed(self) -> bool:
        """Whether something is read or drawn by the place of a tile, so that its numbers are `Placed`."""
        read = self.probability_gradient != "none" or self.score is not None
        return read or (self.packed and self.dropout)

    @property
    def shaped(self) -> bool:
        """Whether anything but scale, bias and masks stands between Q K^T and the softmax."""
        return self.score is not None or self.softcap or self.logit_clip != "none"

    @property
    def nan_by_key(self) -> bool:
        """Whether a dead row that is NaN by rule may hold keys that nothing excludes, whose scores are -inf: their dS
        is NaN. That of an excluded key is 0, and so is then the whole row's; its dV, the head's, is NaN either way."""
        return self.dead_rows_nan and self.corrected

    @property
    def corrected(self) -> bool:
        """Whether rows may be filled with finite numbers so large that their log-sum-exp loses the sum."""
        return self.bias or self.score is not None


class Strides(NamedTuple):
    """Elements between neighbours along each axis of a 4-D tensor; 0 where the axis is broadcast."""

    batch: int
    head: int
    row: int
    column: int


class Place(NamedTuple):
    """The sequence and the query head that a tile belongs to, and where and in what the rows and keys count.

    Of packed sequences `batch` is 0, and the first row and key are those of the sequence among all rows and keys.
    """

    sequence: int
    batch: int
    head: int
    first_row: int
    first_key: int
    rows: int
    keys: int


class Packing(NamedTuple):
    """cu_seqlens of the rows and of the keys, int32 [sequences + 1]."""

    rows: Tensor
    keys: Tensor
    sequences: int


class Shift(NamedTuple):
    """The bounded shift of rows whose maximum repeats."""

    beta: float
    limit: float
    tolerance: float


class Numbers(NamedTuple):
    """Run-time values of S = clip(softcap(score(scale * q.k))) + bias, the dropout probability, and what is rare.

    What is None is not handed to a kernel at all. output_limit: bound of O. probability_gradient: [B, H, Sq, Sk].
    together: how many sequences neighbouring programs take, of variants that say so.
    """

    scale: float
    softcap: float
    logit_limit: float
    dropout: float
    output_limit: float | None = None
    shift: Shift | None = None
    score_inputs: tuple[tuple[Tensor, Strides], ...] | None = None
    probability_gradient: Tensor | None = None
    probability_strides: Strides | None = None
    packing: Packing | None = None
    together: int | None = None
    magnitudes: "Magnitudes | None" = None  # the last: a kernel that reads them puts its own in their place


class Magnitudes(NamedTuple):
    """What scales Q, K and V, as bits, int32; None where the product is not FP8.

    Largest magnitudes: [B, H, 1] by head, [B, H, Dv] of V by row. Scales: [B, H, S] of Q and K by row, S padded to
    whole blocks, and [B, H, blocks] by block.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None


Placed = namedtuple("Placed", (*Numbers._fields, "place"))
"""Numbers, and the Place of a tile: made in a kernel, where its variant is `placed`."""
