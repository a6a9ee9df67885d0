"""What an attention op was asked for, as plain frozen data: the one type that ops, reference and kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precisionpass.numerics.formats import SIXTEEN_BIT
from precisionpass.numerics.fp8 import Products, parse_products


@dataclass(frozen=True)
class AttentionArguments:
    """Every argument of ``torch.ops.precisionpass.attention``, in the order and with the defaults of its schema.

    Shapes: ``q`` [B, H, Sq, D], ``k`` [B, Hk, Sk, D], ``v`` [B, Hk, Sk, Dv]; query head h reads key head
    ``h // (H // Hk)``. ``bias``, ``mask`` and the score inputs are 4-D and broadcast to [B, H, Sq, Sk]; ``sinks`` is
    4-D and broadcasts to [B, H, Sq, 1]. Everything has been checked before an implementation sees it.

    Packed sequences: with cu_seqlens_q and cu_seqlens_k (int32, [sequences + 1], ascending from 0, on q's device) B is
    1; sequence n holds rows cu_seqlens_q[n] to cu_seqlens_q[n + 1], keys cu_seqlens_k[n] to cu_seqlens_k[n + 1], and
    sees no other. Alignment, windows, the score's b, i, j and dropout's keys are each sequence's own; bias, mask,
    sinks, score inputs and dropout's rows count over all. Rows past the last sequence have no key. On a GPU the
    numbers are not read back, so what is not ascending gives wrong rows there, never memory outside of the tensors.

    The scores: x = score(scale * q.k) in the grammar of precisionpass.score; x = softcap * tanh(x / softcap); x clipped
    to +-logit_clip_max ("hard", or "tanh" of it); S = x + bias; -inf where mask is False or causality and the window
    exclude. A sink is one more logit of a row, with a value of zero. Dropout keeps P by seed and position
    (reference/dropout.py); the normaliser does not see it.

    normaliser: "rounded" divides by the sum of the rounded P that multiplies V, "float32" by that of P. delta:
    "residual" takes rowsum dO * O from the output before rounding (with save_residual; without one it recomputes),
    "recompute" takes rowsum(P dP) / rowsum(P), "output" the rounded output. row_max_shift: (beta, limit, tolerance) of
    reference.attention.bounded_shift. output_clip: O to +-c; no gradient where the output stands at c. That and
    grad_clip: ops/clipping.py, around every implementation. dead_rows: what a row that may attend to nothing gives.
    record: where the figures of this call add up (hooks/recorder.py), "" for nowhere; in the backward, which sees all
    that the forward does, or with record_forward in the forward, for calls without one.

    matmul: the products in FP8, such as "qk=fp8_e4m3 pv=fp8_e4m3 scale=head", in the forward alone. What they read is
    cast with power-of-two scales (numerics/fp8.py), P after a multiplication by 2^8 (e5m2: 2^15). The rounded P is what
    the normaliser sums, and the lse is that of the normaliser, within 2^-4 of the one of the unrounded P. There is no
    residual: the backward computes the forward again without FP8 and is that of the 16-bit products.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    score_inputs: tuple[Tensor, ...] = ()
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    fp8_scales: tuple[Tensor, ...] = ()
    scale: float = 1.0
    score: str = "s"
    softcap: float = 0.0
    causal: str = "none"
    window_left: int = -1
    window_right: int = -1
    dropout_p: float = 0.0
    dead_rows: str = "zero"
    normaliser: str = "rounded"
    delta: str = "residual"
    row_max_shift: tuple[float, ...] = ()
    logit_clip: str = "none"
    logit_clip_max: float = 0.0
    output_clip: float = 0.0
    grad_clip: float = 0.0
    grad_clip_kind: str = "none"
    on_nonfinite: str = "keep"
    matmul: str = ""
    deterministic: bool = True
    save_residual: bool = False
    probabilities: str = "none"
    return_max_logits: bool = False
    implementation: str = "auto"
    record: str = ""
    record_forward: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    @property
    def packed(self) -> bool:
        """Whether several sequences stand one after the other in a batch of one."""
        return self.cu_seqlens_q is not None

    @property
    def rounds(self) -> bool:
        """Whether the input format is a 16-bit one, so that P, dS and O are rounded."""
        return self.q.dtype in SIXTEEN_BIT

    @property
    def products(self) -> Products:
        """Which products of the forward are FP8."""
        return parse_products(self.matmul)

    @property
    def keeps_residual(self) -> bool:
        """Whether the forward writes the int8 residual of O: when asked, where O is rounded, of 16-bit products."""
        return self.save_residual and self.rounds and not self.products.any

    @property
    def compute_dtype(self) -> torch.dtype:
        """The format of scores and statistics: FP32, or FP64 for FP64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def key_offset(self) -> int:
        """``off``: row i is aligned with key i + off (bottom_right: Sk - Sq, else 0)."""
        return self.k.shape[2] - self.q.shape[2] if self.causal == "bottom_right" else 0

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """``(left, right)``: row i may attend to keys i + off - left ... i + off + right; None is no bound."""
        left = self.window_left if self.window_left >= 0 else None
        right = self.window_right if self.window_right >= 0 else None
        if self.causal != "none":
            right = 0
        return left, right

    @property
    def dropped_share(self) -> float:
        """dropout_p in the steps of 2^-16 that the stream has (reference/dropout.py)."""
        return round(self.dropout_p * 2**16) / 2**16

    @property
    def keep_scale(self) -> float:
        """What a kept probability is multiplied by under dropout: 1 / (1 - dropped_share), 0 where that is 1."""
        return 0.0 if self.dropped_share >= 1.0 else 1.0 / (1.0 - self.dropped_share)


@dataclass(frozen=True)
class Saved:
    """What the forward left for the backward.

    ``output`` [B, H, Sq, Dv] in q's format; ``residual`` int8 like it, or empty; ``lse`` [B, H, Sq] FP32 (FP64 for
    FP64 inputs), -inf on dead rows as returned to users: a backward reads it as +inf there, so that P is 0.
    """

    output: Tensor
    residual: Tensor
    lse: Tensor

    @property
    def has_residual(self) -> bool:
        """Whether the residual was made (an output without elements has an empty one as well)."""
        return self.residual.dim() == 4


@dataclass(frozen=True)
class Gradients:
    """Gradients of the forward's outputs and which inputs want one.

    ``output`` [B, H, Sq, Dv], any strides, zero where the output stands at its clip; ``lse`` [B, H, Sq] or None;
    ``probabilities`` [B, H, Sq, Sk] or None. ``needs``: q, k, v, bias, sinks, then one flag for each score input.
    """

    output: Tensor
    lse: Tensor | None
    probabilities: Tensor | None
    needs: tuple[bool, ...]


def heads_last_empty(like: Tensor, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised [batch, heads, length, width] whose memory is [batch, length, heads, width], contiguous.

    The layout of every output, residual and dq, dk, dv: a model that splits heads by view and transpose gets its
    layout back without a copy. Sizes may be symbolic.
    """
    return torch.empty((batch, length, heads, width), dtype=dtype, device=like.device).transpose(1, 2)
