"""What one compiled attention kernel is specialised for, and the small bundles of numbers that its launch carries."""

from dataclasses import dataclass
from typing import NamedTuple


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
    mask_descriptor:     tiles of the mask are moved by a tensor descriptor.
    surveyed:            `mask_survey` has told the blocks of the mask that hold nothing or everything.
    rounded_normaliser:  the row sum adds the 16-bit P that multiplies V (NUMERICS 3), by a product with ones.
    precise_log_sum:     the log-sum-exp comes from a sum of the unrounded P beside it; in training from the rounded
                         sum, within 2^-8: one factor for a row of P in the backward, where it cancels.
    two_level:           each block's products start from zero and are added by rounding FP32 additions, not truncating.
    deferred:            a block's P V is added during the next Q K^T.
    ones_width:          columns of ones in that product.
    dead_rows:           some row may have no key; dead_rows_nan: its output is NaN, not 0.
    exact:               FP32 inputs: products in full FP32, P is never rounded.
    log_sum_gradient:    a gradient arrives through the returned log-sum-exp.
    makes_rows:          the kernel of dQ, which runs first, makes delta and shift; else `prepare_rows` has.
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
    softcap: bool = False
    logit_clip: str = "none"
    bias: bool = False
    bias_varies_by_query: bool = False
    bias_varies_by_key: bool = False
    mask: bool = False
    mask_varies_by_query: bool = False
    mask_varies_by_key: bool = False
    apart: bool = False
    surveyed: bool = False
    mask_descriptor: bool = False
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
    dead_rows: bool = False
    dead_rows_nan: bool = False
    exact: bool = False
    log_sum_gradient: bool = False
    makes_rows: bool = False
    split: bool = False

    @property
    def bounded(self) -> bool:
        """Whether some block of keys needs the test of `masks.inside`."""
        return self.right_bound or self.left_bound or not self.whole_keys


class Strides(NamedTuple):
    """Elements between neighbours along each axis of a 4-D tensor; 0 where the axis is broadcast."""

    batch: int
    head: int
    row: int
    column: int


class Numbers(NamedTuple):
    """Run-time scalars of the score: S = clip(softcap(scale * q.k)) + bias, and the dropout probability."""

    scale: float
    softcap: float
    logit_limit: float
    dropout: float
