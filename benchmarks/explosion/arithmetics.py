"""The attention arithmetics that are compared: PyTorch's kernels, ours by rules, and two made for reference.

All take q, k, v [B, H, T, D] in BF16 and give [B, H, T, D] in BF16, causal. "flash" and "cudnn" are PyTorch's own
kernels; what begins with "ours" is the same scaled_dot_product_attention rewritten by precisionpass.compile; "float32"
rounds nothing but its output; "all-bf16" rounds everything, as the failing run of arXiv 2510.04212 does. All but the
last go through precisionpass.compile, which records the bias of delta, and changes nothing where no settings are named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from network import Attend, Network
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import precisionpass
from precisionpass import Match, Rule


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[-2:-1] * 2, dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)


class AllBF16(torch.autograd.Function):
    """Scores, the normaliser and the output in BF16, summed over two blocks of keys; delta from the rounded output."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[-2:-1] * 2, dtype=torch.bool, device=q.device).triu(1)
        output, normaliser = torch.zeros_like(q), q.new_zeros((*q.shape[:-1], 1))
        row_max = torch.full_like(normaliser, -3e38)
        half = q.shape[-2] // 2
        for keys in (slice(0, half), slice(half, None)):
            scores = (q @ k[..., keys, :].mT * q.shape[-1] ** -0.5).masked_fill(later[:, keys], -3e38)
            larger = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            weights, decay = (scores - larger).float().exp(), (row_max - larger).float().exp()
            normaliser = (decay * normaliser + weights.sum(-1, keepdim=True)).to(q.dtype)
            output = (output * decay).to(q.dtype) + weights.to(q.dtype) @ v[..., keys, :]
            row_max = larger
        output = output / normaliser
        ctx.save_for_backward(q, k, v, output, normaliser.float().log() + row_max.float(), later)
        return output

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, output, lse, later = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        delta = (upstream.float() * output.float()).sum(-1, keepdim=True)
        weights = ((q @ k.mT * scale).masked_fill(later, -torch.inf) - lse).exp()
        slope = (weights * ((upstream @ v.mT) - delta) * scale).to(q.dtype)
        return slope @ k, slope.mT @ q, weights.to(q.dtype).mT @ upstream


def all_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return AllBF16.apply(q, k, v)


@dataclass(frozen=True)
class Arithmetic:
    """How attention is computed: by `attend`, under `kernel` of PyTorch's, or rewritten with the settings `ours`.

    graphs: whether a step may be a CUDA graph. watched: whether a monitor looks on.
    """

    attend: Attend = sdpa
    kernel: SDPBackend | None = None
    ours: dict[str, Any] = field(default_factory=dict)
    graphs: bool = True
    watched: bool = True

    def within(self) -> AbstractContextManager:
        """The context in which the network is called."""
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)

    def compiled(self, network: Network, backend: str = "inductor") -> Callable:
        """The network, compiled in place where it can be: an autograd function of Python stays as it is."""
        if not self.watched:
            return network
        rule = Rule(id="attention", match=Match(op="attention"), apply={"record": ["delta_bias"]} | self.ours)
        return precisionpass.compile(network, rules=[rule], backend=backend)


FLASH_STYLE = {"normaliser": "float32", "delta": "output"}
WHEN_SATURATED = {"when": "max_logit > 40", "to": {"delta": "recompute"}, "hold": 100_000}
ARITHMETICS = {
    "float32": Arithmetic(float32),
    "flash": Arithmetic(kernel=SDPBackend.FLASH_ATTENTION),
    "cudnn": Arithmetic(kernel=SDPBackend.CUDNN_ATTENTION),
    "ours": Arithmetic(ours={"delta": "residual"}),
    "ours-recompute": Arithmetic(ours={"delta": "recompute"}),
    "ours-escalating": Arithmetic(ours={"delta": "residual", "escalate": WHEN_SATURATED}, graphs=False),
    "ours-flash-style": Arithmetic(ours=FLASH_STYLE),
    "ours-paper-shift": Arithmetic(ours={"delta": "output", "row_max_shift": {"limit": 8.0}}),
    "all-bf16": Arithmetic(all_bf16, watched=False),
}
ON_CPU = [name for name in ARITHMETICS if name != "cudnn"]
