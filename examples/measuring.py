"""How wrong a model's gradients are, and whether its attention is wrong with a sign: both against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import precisionpass.ops  # noqa: F401  registers torch.ops.precisionpass
from precisionpass.numerics.bias import exact
from precisionpass.numerics.generators import SCALE, Case

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v [B, H, T, D], causal -> output


def gradients(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient of the loss on this batch; the model's own .grad fields stay as they are."""
    named = dict(model.named_parameters())
    loss = model(input_ids=ids, labels=ids).loss
    return dict(zip(named, torch.autograd.grad(loss, tuple(named.values())), strict=True))


def gradient_error(measured: dict[str, Tensor], exact_ones: dict[str, Tensor]) -> float:
    """The norm of all gradients' errors together, relative to the norm of the gradients."""
    error = sum(float((measured[name].double() - true).square().sum()) for name, true in exact_ones.items())
    return (error / sum(float(true.square().sum()) for true in exact_ones.values())) ** 0.5


def attention_of(model: torch.nn.Module, ids: Tensor) -> Case:
    """q, k, v and dO of every layer of a Hugging Face model with causal attention, layers as heads of one case."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def recording(module, query, key, value, attention_mask, scaling=SCALE, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        output.register_hook(lambda upstream: seen.append((query, key, value, upstream)))
        return output.transpose(1, 2), None

    transformers.AttentionInterface.register("recording", recording)
    before = model.config._attn_implementation
    model.set_attn_implementation("recording")
    try:
        model.forward(input_ids=ids, labels=ids).loss.backward()
    finally:
        model.set_attn_implementation(before)
        model.zero_grad()
    q, k, v, upstream = (torch.cat(parts, 1).detach() for parts in zip(*seen, strict=True))
    return Case("the model's own", q, k, v, upstream / upstream.float().std(), x=q, causal="top_left")


def bias(attend: Attend, case: Case) -> tuple[float, float]:
    """|mean rowsum dS| over mean sum |dO| P|V|: 0 in exact arithmetic, and what adds up; with its standard error.

    Read from outside, so that it holds for any attention: q gets a column of zeros and k one of ones. No score
    changes, and the gradient of q's new column is scale * rowsum dS.
    """
    q, v, upstream = (F.pad(part, (0, 1)) for part in (case.q, case.v, case.upstream))
    k = F.pad(case.k, (0, 1), value=1.0)
    q.requires_grad_()
    output = attend(q, k, v, case.causal == "top_left")
    row_sum = torch.autograd.grad(output, q, upstream)[0][..., -1].double() / SCALE
    size = (case.upstream.double().abs() * exact(case).magnitude).sum(-1).mean()
    return float(row_sum.mean().abs() / size), float(row_sum.std() / row_sum.numel() ** 0.5 / size)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention as Hugging Face's eager code writes it."""
    scores = q @ k.transpose(-1, -2) * SCALE
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's scaled_dot_product_attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE)


def flash_style(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The arithmetic of FlashAttention 2 on a GPU: a normaliser of unrounded P, delta from the rounded output."""
    return ours(q, k, v, causal, normaliser="float32", delta="output")


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool, **settings) -> Tensor:
    """The attention that precisionpass puts in place."""
    shape = "top_left" if causal else "none"
    return torch.ops.precisionpass.attention(q, k, v, scale=SCALE, causal=shape, save_residual=True, **settings)[0]
