"""Compositions that look like attention, nearly are, or are in a strange spelling: equal to eager, fused or not.

Sizes coincide on purpose (keys as many as the width, heads as many as the batch): a shape is never evidence.
"""

import math

import pytest
import torch
from torch.nn import functional

from tests.agreement import against_eager, counts


def attend(q, k, v):
    return (q @ k.mT / math.sqrt(8)).softmax(-1) @ v


Q, K = (2, 3, 5, 8), (2, 4, 5, 8)  # the shapes of most cases

# name: (the call, the shapes of its arguments)
CASES = {
    "entropy": (lambda q, k, v: ((p := (q @ k.mT).softmax(-1)) @ v, -(p * p.log()).sum(-1)), [Q] * 3),
    "argmax": (lambda q, k, v: ((p := (q @ k.mT).softmax(-1)) @ v, p.argmax(-1)), [Q] * 3),
    "scores returned": (lambda q, k, v: ((s := q @ k.mT / 3).softmax(-1) @ v, s), [Q] * 3),
    "lse returned": (lambda q, k, v: ((s := q @ k.mT / 3).softmax(-1) @ v, s.logsumexp(-1)), [Q] * 3),
    "max returned": (lambda q, k, v: ((s := q @ k.mT / 3).softmax(-1) @ v, s.amax(-1)), [Q] * 3),
    "v from q": (lambda q, k, v: attend(q, k, q * 2) + attend(k, v, k), [Q] * 3),
    "k mean": (lambda q, k, v: (q @ (k - k.mean(-2, keepdim=True)).mT).softmax(-1) @ v, [Q] * 3),
    "einsum": (
        lambda q, k, v: torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
        [Q] * 3,
    ),
    "einsum 5d": (
        lambda q, k, v: torch.einsum("bghij,bgjd->bghid", torch.einsum("bghid,bgjd->bghij", q, k).softmax(-1), v),
        [(2, 2, 3, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)],
    ),
    "baddbmm": (
        lambda q, k, v, b: torch.bmm(torch.baddbmm(b, q, k.mT, beta=0.5, alpha=0.3).softmax(-1), v),
        [(6, 5, 8), (6, 7, 8), (6, 7, 8), (6, 5, 7)],
    ),
    "baddbmm empty beta0": (
        lambda q, k, v: torch.bmm(torch.baddbmm(torch.empty(6, 5, 7), q, k.mT, beta=0, alpha=0.3).softmax(-1), v),
        [(6, 5, 8), (6, 7, 8), (6, 7, 8)],
    ),
    "double softmax": (lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v, [Q] * 3),
    "softmax of softmax attn": (lambda q, k, v: (attend(q, k, v) @ k.mT).softmax(-1) @ attend(k, q, v), [Q] * 3),
    "per head temp": (lambda q, k, v, te: (q @ k.mT * te.exp()).softmax(-1) @ v, [Q, Q, Q, (3, 1, 1)]),
    "per query scale": (lambda q, k, v, te: (q @ k.mT * te).softmax(-1) @ v, [Q, Q, Q, (1, 1, 5, 1)]),
    "per key scale": (lambda q, k, v, te: (q @ k.mT * te).softmax(-1) @ v, [Q, Q, Q, (5,)]),
    "scale tensor grad": (lambda q, k, v, te: (q @ k.mT * te).softmax(-1) @ v, [Q, Q, Q, ()]),
    "scale by norm": (lambda q, k, v: (q @ k.mT / q.norm()).softmax(-1) @ v, [Q] * 3),
    "clamp": (lambda q, k, v: (q @ k.mT).clamp(-1, 1).softmax(-1) @ v, [Q] * 3),
    "relu scores": (lambda q, k, v: (q @ k.mT).relu().softmax(-1) @ v, [Q] * 3),
    "abs scores": (lambda q, k, v: (q @ k.mT).abs().neg().softmax(-1) @ v, [Q] * 3),
    "square": (lambda q, k, v: (-((q @ k.mT) ** 2)).softmax(-1) @ v, [Q] * 3),
    "cdist-like": (
        lambda q, k, v: (2 * q @ k.mT - (q**2).sum(-1, keepdim=True) - (k**2).sum(-1)[..., None, :]).softmax(-1) @ v,
        [Q] * 3,
    ),
    "v transposed": (lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1).mT).mT, [Q] * 3),
    "k transposed given": (lambda q, k, v: (q @ k).softmax(-1) @ v, [Q, (2, 3, 8, 5), Q]),
    "rows mixed": (lambda q, k, v: (q @ k.mT).softmax(-1).flip(-2) @ v, [Q] * 3),
    "keys flipped both": (lambda q, k, v: (q @ k.mT).softmax(-1).flip(-1) @ v.flip(-2), [Q] * 3),
    "square sizes all same": (lambda q, k, v: (q @ k).softmax(-1) @ v, [(2, 3, 8, 8)] * 3),
    "square wrong axis": (lambda q, k, v: (q @ k).softmax(-2) @ v, [(2, 3, 8, 8)] * 3),
    "square p transposed": (lambda q, k, v: (q @ k).softmax(-1).mT @ v, [(2, 3, 8, 8)] * 3),
    "heads to batch mismatch": (lambda q, k, v: (q @ k.mT).softmax(-1).transpose(0, 1) @ v, [(3, 3, 5, 8)] * 3),
    "batch flipped": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v.flip(0), [(3, 3, 5, 8)] * 3),
    "view reinterpret": (lambda q, k, v: (q @ k.mT).softmax(-1).view(3, 2, 5, 5) @ v.view(3, 2, 5, 8), [Q] * 3),
    "head split odd": (
        lambda q, k, v: (q @ k.mT).softmax(-1).reshape(6, 5, 5) @ v.transpose(0, 1).reshape(6, 5, 8),
        [Q] * 3,
    ),
    "gqa tiled": (
        lambda q, k, v: (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat(1, 2, 1, 1),
        [K, (2, 2, 5, 8), (2, 2, 5, 8)],
    ),
    "gqa mixed": (
        lambda q, k, v: (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1),
        [K, (2, 2, 5, 8), (2, 2, 5, 8)],
    ),
    "gqa k only": (lambda q, k, v: (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v, [K, (2, 2, 5, 8), K]),
    "mqa": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, [K, (2, 1, 5, 8), (2, 1, 5, 8)]),
    "mqa rows merged": (
        lambda q, k, v: ((q.reshape(2, 20, 8) @ k.mT).softmax(-1) @ v).view(2, 4, 5, 8),
        [K, (2, 5, 8), (2, 5, 8)],
    ),
    "sdpa gqa": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True),
        [K, (2, 2, 5, 8), (2, 2, 5, 8)],
    ),
    "sdpa causal cross": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [K, (2, 4, 7, 8), (2, 4, 7, 8)],
    ),
    "sdpa causal cross2": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 7, 8), K, K],
    ),
    "tril causal cross": (
        lambda q, k, v: (q @ k.mT).masked_fill(torch.ones(5, 9).tril(4) == 0, -math.inf).softmax(-1) @ v,
        [K, (2, 4, 9, 8), (2, 4, 9, 8)],
    ),
    "window": (
        lambda q, k, v: (
            (q @ k.mT)
            .masked_fill(
                ((torch.arange(9)[:, None] - torch.arange(9)) > 2) | (torch.arange(9)[:, None] < torch.arange(9)),
                -math.inf,
            )
            .softmax(-1)
            @ v
        ),
        [(2, 4, 9, 8)] * 3,
    ),
    "tril times": (lambda q, k, v: ((q @ k.mT) * torch.ones(5, 5).tril()).softmax(-1) @ v, [K] * 3),
    "p masked after": (lambda q, k, v: ((q @ k.mT).softmax(-1) * torch.ones(5, 5).tril()) @ v, [K] * 3),
    "p renormalised": (
        lambda q, k, v: ((p := (q @ k.mT).softmax(-1) * torch.ones(5, 5).tril()) / p.sum(-1, keepdim=True)) @ v,
        [K] * 3,
    ),
    "exp sum": (lambda q, k, v: ((e := (q @ k.mT / 3).exp()) / e.sum(-1, keepdim=True)) @ v, [K] * 3),
    "exp sum masked": (
        lambda q, k, v: ((e := (q @ k.mT / 3).exp() * torch.ones(5, 5).tril()) / e.sum(-1, keepdim=True)) @ v,
        [K] * 3,
    ),
    "exp sum eps": (lambda q, k, v: ((e := (q @ k.mT / 3).exp()) / (e.sum(-1, keepdim=True) + 1e-2)) @ v, [K] * 3),
    "late div": (lambda q, k, v: ((e := (q @ k.mT / 3).exp()) @ v) / e.sum(-1, keepdim=True), [K] * 3),
    "softmax1": (lambda q, k, v: ((e := (q @ k.mT / 3).exp()) / (1 + e.sum(-1, keepdim=True))) @ v, [K] * 3),
    "sink cat": (
        lambda q, k, v, s: torch.cat([q @ k.mT, s.expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1] @ v,
        [K, K, K, (4, 1, 1)],
    ),
    "sink cat first": (
        lambda q, k, v, s: torch.cat([s.expand(2, 4, 5, 1), q @ k.mT], -1).softmax(-1)[..., 1:] @ v,
        [K, K, K, (4, 1, 1)],
    ),
    "sink slice wrong": (
        lambda q, k, v, s: torch.cat([q @ k.mT, s.expand(2, 4, 5, 1)], -1).softmax(-1)[..., 1:] @ v,
        [K, K, K, (4, 1, 1)],
    ),
    "topk mask": (
        lambda q, k, v: (s := q @ k.mT).masked_fill(s < s.topk(2, -1).values[..., -1:], -math.inf).softmax(-1) @ v,
        [K] * 3,
    ),
    "mask from scores": (
        lambda q, k, v: (s := q @ k.mT).masked_fill(s < 0, -math.inf).softmax(-1).nan_to_num() @ v,
        [K] * 3,
    ),
    "q norm rms": (
        lambda q, k, v: ((q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6)) @ k.mT).softmax(-1) @ v,
        [K] * 3,
    ),
}

# What no rule may make an attention op of: other axes, other weights, other normalisers.
NEVER = (
    "square wrong axis",
    "square p transposed",
    "double softmax",
    "rows mixed",
    "view reinterpret",
    "p renormalised",
    "exp sum eps",
    "sink slice wrong",
)


def inputs(name: str) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in CASES[name][1]]


@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager(name):
    report = against_eager(CASES[name][0], inputs(name))
    assert report.events == ()
    assert name not in NEVER or "attention" not in counts(report), report.text()


SYMBOLIC = [
    name for name in CASES if any(word in name for word in ("gqa", "mqa", "sdpa", "sink", "head", "5d", "square"))
]


@pytest.mark.parametrize("name", SYMBOLIC)
def test_equal_to_eager_with_symbolic_sizes(name):
    report = against_eager(CASES[name][0], inputs(name), backend="eager", dynamic=True)
    assert report.events == ()
    assert name not in NEVER or "attention" not in counts(report), report.text()
