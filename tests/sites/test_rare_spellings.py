"""Attention as fewer repositories write it: one site each, equal when rewritten; and what only looks like it."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import against_eager, counts, reasons

B, H, S, D = 2, 4, 6, 8
SHOWN = f"{D**-0.5:.6g}"
LOWER = torch.ones(S, S, dtype=torch.bool).tril()


def scores(q, k):
    return q @ k.mT * D**-0.5


def off_by_one(q, k, v):
    e = scores(q, k).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def off_by_one_shifted(q, k, v):
    s = scores(q, k)
    largest = s.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - largest)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-largest)) @ v


def sink_logit(q, k, v, sink):
    s = scores(q, k)
    largest = torch.maximum(s.amax(-1, keepdim=True), sink)
    e = torch.exp(s - largest)
    return e / (torch.exp(sink - largest) + e.sum(-1, keepdim=True)) @ v


def sink_in_the_logarithm(q, k, v, sink):
    s = scores(q, k)
    return torch.exp(s - torch.logaddexp(s.logsumexp(-1, keepdim=True), sink)) @ v


def sink_column_first(q, k, v, sink):
    return torch.cat([sink.expand(B, H, S, 1), scores(q, k)], -1).softmax(-1)[..., 1:] @ v


def padded_column(q, k, v):
    return F.pad(scores(q, k), (0, 1)).softmax(-1)[..., :-1] @ v


def several_sinks(q, k, v, sink):
    sinks = torch.cat([sink, 2 * sink, -sink], -1).expand(B, H, S, 3)
    return torch.cat([scores(q, k), sinks], -1).softmax(-1)[..., :S] @ v


def rows_of_nan(q, k, v):
    keys = torch.zeros(S, S, dtype=torch.bool)
    keys[:, 0] = True
    keys[2] = False
    return scores(q, k).masked_fill(~keys, -math.inf).softmax(-1).nan_to_num(0.0) @ v


def masked_exponentials(q, k, v):
    s = scores(q, k)
    e = torch.exp(s - s.max(-1, keepdim=True)[0]) * torch.ones(S, S).tril()
    return e / e.sum(-1, keepdim=True) @ v


def exponentials_filled_with_zero(q, k, v):
    e = scores(q, k).exp().masked_fill(~LOWER, 0.0)
    return e / e.sum(-1, keepdim=True) @ v


def put_at_a_mask(q, k, v):
    s = scores(q, k)
    s[:, :, torch.ones(S, S, dtype=torch.bool).triu(1)] = -math.inf
    return s.softmax(-1) @ v


def a_mask_that_is_put_together(q, k, v):
    row, column = torch.triu_indices(S, S, 1)
    mask = torch.zeros(S, S)
    mask[row, column] = -math.inf
    return (scores(q, k) + mask).softmax(-1) @ v


def zeroed_by_a_product(q, k, v):
    mask = torch.ones(S, S).tril()
    return (scores(q, k).masked_fill(mask == 0, -math.inf).softmax(-1) * mask) @ v


def zeroed_by_the_negation(q, k, v):
    return torch.where(LOWER, scores(q, k).masked_fill(~LOWER, -1e9).softmax(-1), 0.0) @ v


def divided_later_by_a_vector(q, k, v):
    s = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
    e = torch.exp(s - s.amax(-1)[..., None])
    return torch.einsum("bhij,bhjd->bhid", e, v) / e.sum(-1).unsqueeze(-1)


def multiplied_later_by_the_inverse(q, k, v):
    e = scores(q, k).exp()
    return (e @ v) * (1 / e.sum(-1, keepdim=True))


def two_dimensions_with_a_bias(q, k, v):
    return torch.addmm(torch.full((S, S), -1e4).triu(1), q[0, 0], k[0, 0].mT, alpha=D**-0.5).softmax(-1).mm(v[0, 0])


def tensordot(q, k, v):
    return torch.tensordot(torch.tensordot(q[0, 0], k[0, 0], dims=([1], [1])).softmax(-1), v[0, 0], dims=1)


def pooled(q, k, v):
    """One query a batch row; the sums keep their dimensions."""
    weights = ((k[:, 0] * q[:, 0, :1]).sum(-1, keepdim=True) * D**-0.5).softmax(1)
    return (weights * v[:, 0]).sum(1)


def rows_of_their_own(q, k, v):
    """Relative positions on the values (Shaw et al.): the probabilities are returned for that."""
    p = scores(q, k).softmax(-1)
    relative = torch.linspace(-1, 1, S * S * D).view(S, S, D)
    return torch.einsum("bhij,ijd->bhid", p, relative) + p @ v


PLAIN = f"softmax(QK^T * {SHOWN}) V"
CAUSAL = f"softmax(QK^T * {SHOWN}, j <= i) V"
SPELLINGS = {
    off_by_one: f"softmax(QK^T * {SHOWN}, sink 0) V",
    off_by_one_shifted: f"softmax(QK^T * {SHOWN}, sink 0) V",
    sink_logit: f"softmax(QK^T * {SHOWN}, sink l_sink_) V",
    sink_in_the_logarithm: f"softmax(QK^T * {SHOWN}, sink l_sink_) V",
    sink_column_first: f"softmax(QK^T * {SHOWN}, sink expand) V",
    padded_column: f"softmax(QK^T * {SHOWN}, sink 0) V",
    several_sinks: f"softmax(QK^T * {SHOWN}, sink sinks) V",
    rows_of_nan: None,
    masked_exponentials: CAUSAL,
    exponentials_filled_with_zero: None,
    put_at_a_mask: CAUSAL,
    a_mask_that_is_put_together: f"softmax(QK^T * {SHOWN} + mask[i,j]) V",
    zeroed_by_a_product: CAUSAL,
    zeroed_by_the_negation: None,
    divided_later_by_a_vector: PLAIN,
    multiplied_later_by_the_inverse: PLAIN,
    two_dimensions_with_a_bias: None,
    tensordot: "softmax(QK^T) V",
    pooled: PLAIN,
    rows_of_their_own: PLAIN,
}


def inputs(call):
    tensors = [torch.randn(B, H, S, D) for _ in range(3)]
    tensors += [torch.randn(H, 1, 1)] * (call.__code__.co_argcount - 3)
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("call", SPELLINGS, ids=lambda call: call.__name__)
def test_is_found_rewritten_and_equal(call):
    report = against_eager(call, inputs(call), rewritten={"attention": 1})
    [site] = [site for site in report.sites if site.kind == "attention"]
    assert SPELLINGS[call] in (None, site.formula)
    assert not report.near_misses


def weighted_exponentials(q, k, v):
    e = scores(q, k).exp() * torch.linspace(0, 1, S)
    return e / e.sum(-1, keepdim=True) @ v


def weighted_probabilities(q, k, v):
    return (scores(q, k).softmax(-1) * torch.linspace(0, 1, S)) @ v


def another_mask_than_the_scores(q, k, v):
    return (scores(q, k).masked_fill(~LOWER, -math.inf).softmax(-1) * torch.ones(S, S).tril(-1)) @ v


def sums_of_other_rows(q, k, v):
    """S = 6 rows of H = 6 heads: the sums meet heads where they should meet rows."""
    q, k, v = (x.flatten(1, 2)[:, : S * S].unflatten(1, (S, S)) for x in (torch.cat([x, x], 1) for x in (q, k, v)))
    e = scores(q, k).exp()
    return torch.einsum("bhij,bhjd->bihd", e, v) / e.sum(-1, keepdim=True)


def a_sink_with_another_shift(q, k, v):
    s = scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / (e.sum(-1, keepdim=True) + torch.exp(-s.mean(-1, keepdim=True))) @ v


def the_other_column(q, k, v):
    return F.pad(scores(q, k), (1, 0)).softmax(-1)[..., :-1] @ v


def another_sum_for_each_key(q, k, v):
    e = scores(q, k).exp()
    return e / (e.sum(-1, keepdim=True) + torch.linspace(0, 1, S).exp()) @ v


def numbers_for_nan(q, k, v):
    return scores(q, k).masked_fill(~LOWER.flip(0), -math.inf).softmax(-1).nan_to_num(1.0) @ v


NONE = {
    weighted_exponentials: "weighted_normaliser",
    weighted_probabilities: "mixed_after_softmax",
    another_mask_than_the_scores: "mixed_after_softmax",
    sums_of_other_rows: "no_value_product",
    the_other_column: "mixed_after_softmax",
    another_sum_for_each_key: "weighted_normaliser",
    numbers_for_nan: "mixed_after_softmax",
}


@pytest.mark.parametrize("call", NONE, ids=lambda call: call.__name__)
def test_only_looks_like_one(call):
    report = against_eager(call, inputs(call))
    assert "attention" not in counts(report)
    assert NONE[call] in reasons(report), report.text()


def test_a_sink_beside_another_shift_is_what_it_is():
    """exp(-mean) beside exp(s - max): a sink of max - mean, which reads the scores."""
    against_eager(a_sink_with_another_shift, inputs(a_sink_with_another_shift))


def squared_distances(q, k, v):
    squares = (q * q).sum(-1, keepdim=True) - 2 * q @ k.mT + (k * k).sum(-1)[..., None, :]
    return (-squares.clamp(min=0).sqrt()).softmax(-1) @ v


def three_operands(q, k, v):
    return torch.einsum("bhid,bhjd,h->bhij", q, k, torch.arange(1.0, H + 1)).softmax(-1) @ v


@pytest.mark.parametrize(("call", "named"), [(squared_distances, "sqrt"), (three_operands, "einsum")])
def test_what_stands_before_the_softmax_is_named(call, named):
    report = against_eager(call, inputs(call))
    assert [(m.reason, named in m.message) for m in report.near_misses] == [("no_query_key_product", True)]
