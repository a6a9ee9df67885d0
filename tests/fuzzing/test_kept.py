"""What the fuzz has found once, kept as tests."""

import math

import pytest
import torch

from precisionpass import Rule
from tests.agreement import against_eager, counts

KERNEL = [Rule(id="norms", match={"op": ["layer_norm", "rms_norm"]},
               apply={"implementation": "auto", "lowering": "kernel"})]  # fmt: skip


def test_one_over_the_root():
    """`1 / x` is a reciprocal times one."""

    def call(x):
        return x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    report = against_eager(call, (torch.randn(3, 16, requires_grad=True),))
    assert [site.kind for site in report.sites] == ["rms_norm"]


def test_a_layer_norm_whose_weight_counts_from_one():
    """The layer norm op has no such weight: the sum is taken as the weight."""

    def call(x, weight, bias):
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed * (1 + weight) + bias

    inputs = tuple(torch.randn(*shape, requires_grad=True) for shape in ((3, 16), (16,), (16,)))
    report = against_eager(call, inputs, rules=KERNEL, rewritten={"layer_norm": 1})
    assert report.sites[0].formula.endswith("* w + b")


def test_statistics_that_are_read_elsewhere_too():
    def call(x):
        spread = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(spread + 1e-5), spread

    report = against_eager(call, (torch.randn(3, 16, requires_grad=True),), rules=KERNEL, rewritten={"layer_norm": 1})
    assert "used elsewhere" in report.sites[0].message


def qkv(*shape):
    return tuple(torch.randn(*shape, requires_grad=True) for _ in range(3))


@pytest.mark.parametrize("after", ["cap", "sign", "shrunk"])
def test_a_mask_that_something_follows_is_no_relation(after):
    """A fill of -1e9 that a cap bounds, a sign turns or a small factor shrinks masks nothing."""

    def call(q, k, v):
        scores = (q @ k.mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9)
        scores = {"cap": 5.0 * torch.tanh(scores / 5.0), "sign": -scores, "shrunk": scores * 1e-9}[after]
        return scores.softmax(-1) @ v

    report = against_eager(call, qkv(2, 3, 5, 8))
    assert not any(site.facts["causal"] for site in report.sites if site.kind == "attention")


@pytest.mark.parametrize("padding", ["added", "filled"])
def test_padding_and_causality_with_finite_fills_leave_their_meaning_to_rows_without_a_key(padding):
    """Left padding: in its first rows every key that causality allows is padded, and all fills count alike."""

    def call(q, k, v, padded):
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9)
        scores = scores + padded * -1e9 if padding == "added" else scores.masked_fill(padded > 0, -1e9)
        return scores.softmax(-1) @ v

    padded = torch.zeros(2, 1, 1, 5)
    padded[0, ..., :3] = 1
    against_eager(call, (*qkv(2, 3, 5, 8), padded), rewritten={"attention": 1})


def test_two_masks_with_finite_fills_that_keep_every_row_s_own_key_are_one_relation():
    def call(q, k, v):
        ones = torch.ones(5, 5, dtype=torch.bool)
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(ones.triu(1), -1e9)
        return scores.masked_fill(~ones.triu(-2), -1e9).softmax(-1) @ v

    report = against_eager(call, qkv(2, 3, 5, 8), rewritten={"attention": 1})
    facts = report.sites[0].facts
    assert (facts["causal"], facts["window"], facts["masked"]) == (True, 3, False)


def test_scores_of_any_memory_layout_under_grouped_heads():
    """A mask whose memory is permuted gives scores of that layout, which a view of the reference could not take."""

    def call(q, k, v, mask):
        scores = 5.0 * torch.tanh(q.unflatten(1, (2, 2)) @ k[:, :, None].mT / 5.0)
        scores = torch.where(mask, -1e9, scores) * 0.5
        return scores.softmax(-1) @ v[:, :, None]

    q, (k, v, _) = torch.randn(2, 4, 7, 4, requires_grad=True), qkv(2, 2, 5, 4)
    mask = (torch.rand(5, 7, 2, 2, 2) > 0.7).permute(4, 3, 2, 1, 0)
    report = against_eager(call, (q, k, v, mask))
    assert counts(report) == {"attention": 1}


@pytest.mark.parametrize("mask_shape", [(1, 2, 3), (1, 1, 2, 1)])
def test_a_finite_fill_over_a_causal_mask(mask_shape):
    """What it fills last is -1e4 and no longer -inf: a row that it fills whole sees every key, later ones as well."""

    def call(q, k, v, mask):
        scores = (q @ k.mT).masked_fill(torch.ones(2, 3, dtype=torch.bool).triu(1), -math.inf)
        return scores.masked_fill(~mask, -1e4).softmax(-1) @ v

    mask = torch.ones(mask_shape, dtype=torch.bool)
    mask[..., 0, :] = False
    inputs = [torch.randn(1, 1, n, 4, requires_grad=True) for n in (2, 3, 3)]
    report = against_eager(call, (*inputs, mask), rewritten={"attention": 1})
    assert not report.sites[0].facts["causal"]


def test_a_weight_in_the_root_over_all_dimensions():
    def call(x, weight):
        return x * (torch.rsqrt((x * x).mean((0, 1), keepdim=True) + 1e-5) * weight)

    inputs = (torch.randn(2, 7, requires_grad=True), torch.randn(2, 7, requires_grad=True))
    against_eager(call, inputs, rules=KERNEL, rewritten={"rms_norm": 1})


def test_a_gate_in_the_root_is_no_weight():
    def call(x, gate):
        return x * (torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gate)

    inputs = (torch.randn(2, 7, requires_grad=True), torch.randn(2, 7, requires_grad=True))
    against_eager(call, inputs, rules=KERNEL, rewritten={})


def test_a_row_of_exponentials_that_all_underflow():
    """Each is zero without the maximum taken away, and the row NaN, which becomes zero: no softmax gives that."""

    def call(q, k, v):
        e = (q @ k.mT - 1e4).exp()
        return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v

    against_eager(call, qkv(2, 3, 5, 8), rewritten={})
