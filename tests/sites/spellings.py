"""Ways to write one attention: name -> (function of q, k, v, formula, options). q, k, v: [B, H, S, D] unless said."""

import math

import torch
import torch.nn.functional as F

B, H, S, D = 2, 4, 12, 8
SCALE = D**-0.5
SHOWN = f"{SCALE:.6g}"
PLAIN = f"softmax(QK^T * {SHOWN}) V"
CAUSAL = f"softmax(QK^T * {SHOWN}, j <= i) V"
ATTENTION = {}


def spelling(formula: str = PLAIN, **options):
    def note(function):
        ATTENTION[function.__name__] = (function, formula, options)
        return function

    return note


def lower():
    return torch.ones(S, S, dtype=torch.bool).tril()


@spelling()
def matmul_divided(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D), dim=-1), v)


@spelling()
def scaled_query(q, k, v):
    return ((q * SCALE) @ k.mT).softmax(-1) @ v


@spelling()
def divided_by_a_tensor(q, k, v):
    return (q @ k.mT / torch.full([], math.sqrt(D))).softmax(-1) @ v


@spelling()
def einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bhid", (torch.einsum("b h i d, b h j d -> b h i j", q, k) * SCALE).softmax(-1), v)


@spelling(layout="bshd")
def einsum_heads_second(q, k, v):
    return torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1), v)


@spelling(layout="bshd")
def permuted(q, k, v):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    return ((q @ k.permute(0, 1, 3, 2) * SCALE).softmax(-1) @ v).permute(0, 2, 1, 3).reshape(B, S, H * D)


@spelling()
def bmm(q, k, v):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * SCALE).softmax(-1), v).view(B, H, S, D)


@spelling()
def baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(B * H, S, S, dtype=q.dtype)
    return torch.bmm(torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=SCALE).softmax(-1), v)


@spelling()
def keys_times_queries(q, k, v):
    return (k @ q.mT * SCALE).softmax(-2).mT @ v


@spelling()
def multiply_and_sum(q, k, v):
    p = ((q[:, :, :, None] * k[:, :, None]).sum(-1) * SCALE).softmax(-1)
    return (p[..., None] * v[:, :, None]).sum(3)


@spelling()
def exponentials(q, k, v):
    s = q @ k.mT * SCALE
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@spelling()
def divided_after_the_values(q, k, v):
    s = q @ k.mT * SCALE
    e = torch.exp(s - s.max(-1, keepdim=True).values)
    return e @ v / e.sum(-1, keepdim=True)


@spelling()
def log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT * SCALE, -1).exp() @ v


@spelling()
def logsumexp(q, k, v):
    s = q @ k.mT * SCALE
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


@spelling()
def in_place(q, k, v):
    s = q @ k.mT
    s *= SCALE
    return s.softmax(-1) @ v


@spelling()
def three_dimensions(q, k, v):
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    return (q @ k.mT * SCALE).softmax(-1) @ v


@spelling(kv_heads=2)
def repeated_keys(q, k, v):
    k, v = (x[:, :, None].expand(B, 2, H // 2, S, D).reshape(B, H, S, D) for x in (k, v))
    return (q @ k.mT * SCALE).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@spelling(kv_heads=2)
def interleaved_keys(q, k, v):
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


@spelling(kv_heads=2)
def tiled_keys(q, k, v):
    k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


@spelling(kv_heads=1)
def one_key_head(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1) @ v


@spelling(kv_heads=2)
def grouped_einsum(q, k, v):
    q = q.unflatten(1, (2, 2))
    return torch.einsum("bkgij,bkjd->bkgid", (torch.einsum("bkgid,bkjd->bkgij", q, k) * SCALE).softmax(-1), v).flatten(
        1, 2
    )


@spelling(CAUSAL)
def masked_fill(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf")).softmax(-1) @ v


@spelling(CAUSAL)
def where_smallest(q, k, v):
    s = q @ k.mT * SCALE
    return torch.where(lower(), s, torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype)).softmax(-1) @ v


@spelling(CAUSAL)
def added_triangle(q, k, v):
    return (torch.full((S, S), float("-inf")).triu(1) + q @ k.mT * SCALE).softmax(-1) @ v


@spelling(CAUSAL)
def compared_positions(q, k, v):
    i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
    return (q @ k.mT * SCALE + torch.where(j <= i, 0.0, -1e9)).softmax(-1) @ v


@spelling(f"softmax(QK^T * {SHOWN}, j <= i, j >= i - 3) V")
def sliding_window(q, k, v):
    i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
    return (q @ k.mT * SCALE).masked_fill(~((j <= i) & (i - j < 4)), float("-inf")).softmax(-1) @ v


@spelling(CAUSAL)
def called_by_name(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@spelling(kv_heads=2)
def called_by_name_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@spelling(f"softmax(tanh(QK^T * {SCALE / 5.0:.6g}) * 5) V")
def softcap(q, k, v):
    return (torch.tanh(q @ k.mT * SCALE / 5.0) * 5.0).softmax(-1) @ v


@spelling(f"softmax(clamp(QK^T * {SHOWN}, -1, 1)) V")
def clamped(q, k, v):
    return (q @ k.mT * SCALE).clamp(-1.0, 1.0).softmax(-1) @ v


@spelling(f"softmax(QK^T * {SHOWN}, sink zeros) V")
def sink_column(q, k, v):
    s = torch.cat([q @ k.mT * SCALE, torch.zeros(B, H, S, 1)], -1)
    return (s - s.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


@spelling(f"softmax(QK^T * {SHOWN}, sink zeros) V")
def sink_of_zeros(q, k, v):
    """Softmax off by one."""
    return torch.cat([q @ k.mT * SCALE, torch.zeros(B, H, S, 1)], -1).softmax(-1)[:, :, :, :S] @ v


@spelling(f"softmax(QK^T * {SHOWN} + alibi[h,i,j]) V")
def alibi(q, k, v):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    alibi = slopes * -(torch.arange(S)[:, None] - torch.arange(S)[None, :]).abs()
    return (q @ k.mT * SCALE + alibi).softmax(-1) @ v


@spelling(f"softmax(QK^T * {SHOWN} + seen[i,j]) V")
def a_boolean_is_added(q, k, v):
    seen = (torch.arange(S)[:, None] * torch.arange(S)[None, :]) % 3 == 0
    return (q @ k.mT * SCALE + seen).softmax(-1) @ v


@spelling(f"softmax(QK^T * (-{SHOWN}) + mask[i,j]) V")
def taken_away_from_a_mask(q, k, v):
    mask = torch.arange(S)[:, None] * torch.arange(S)[None, :] * 0.01
    return torch.rsub(q @ k.mT * SCALE, mask).softmax(-1) @ v


@spelling(f"softmax(QK^T * {SHOWN} + mask[i,j] * (-1)) V")
def a_mask_is_taken_away(q, k, v):
    mask = torch.arange(S)[:, None] * torch.arange(S)[None, :] * 0.01
    return torch.rsub(mask, q @ k.mT * SCALE).softmax(-1) @ v
