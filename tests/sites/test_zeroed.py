"""Probabilities set to zero after the softmax where the scores are masked; heads whose output nothing reads."""

import math

import pytest
import torch
from torch import nn

from tests.agreement import against_eager, counts, reasons


def inputs(length: int = 6):
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for _ in range(3))
    padding = torch.ones(2, 1, 1, length, dtype=torch.long)
    padding[0, ..., 4:] = 0
    padding[1] = 0  # not one key is left: the output is zero
    return q, k, v, padding


FILLS = {"lowest": torch.finfo(torch.float32).min, "-inf": -math.inf, "-1e9": -1e9}
SPELLINGS = {
    "in place": lambda s, hidden: s.softmax(-1).masked_fill_(hidden, 0),
    "masked_fill": lambda s, hidden: s.softmax(-1).masked_fill(hidden, 0.0),
    "where": lambda s, hidden: torch.where(hidden, 0.0, s.softmax(-1)),
    "where not": lambda s, hidden: torch.where(~hidden, s.softmax(-1), torch.zeros(())),
}


@pytest.mark.parametrize(
    ("spelling", "fill"),
    [*(("masked_fill", f) for f in FILLS), ("in place", "-1e9"), ("where", "-inf"), ("where not", "lowest")],
)
def test_a_masked_softmax_that_zeroes_what_it_masked(spelling, fill):
    def call(q, k, v, padding, relative):
        hidden = padding == 0
        scores = q @ k.mT / math.sqrt(8) + q @ relative
        if spelling == "where not":
            scores = torch.where(~(padding == 0), scores, FILLS[fill])  # the same mask, computed twice
        else:
            scores = scores.masked_fill(hidden, FILLS[fill])
        return SPELLINGS[spelling](scores, hidden) @ v

    # eager's own gradients are an error in place, and NaN in a row without keys that is filled with -inf
    training = spelling != "in place" and fill != "-inf"
    against_eager(call, (*inputs(), torch.randn(8, 6)), training=training, rewritten={"attention": 1})


def test_zeroing_what_the_scores_do_not_exclude_is_not_followed():
    def unmasked(q, k, v, padding):
        return (q @ k.mT).softmax(-1).masked_fill(padding == 0, 0) @ v

    def another_mask(q, k, v, padding):
        scores = (q @ k.mT).masked_fill(padding.roll(1, -1) == 0, -1e9)
        return scores.softmax(-1).masked_fill(padding == 0, 0) @ v

    def reachable(q, k, v, padding):
        return (q @ k.mT).masked_fill(padding == 0, -10.0).softmax(-1).masked_fill(padding == 0, 0) @ v

    def two_masks(q, k, v, padding):
        """A row that only both together leave without a key is uniform over all keys before the zeroing."""
        scores = q @ k.mT + torch.where(padding == 1, -1e9, 0.0)
        return scores.masked_fill(padding == 0, -1e9).softmax(-1).masked_fill(padding == 0, 0) @ v

    for call in (unmasked, another_mask, reachable, two_masks):
        report = against_eager(call, inputs())
        assert "attention" not in counts(report), call.__name__
        assert "mixed_after_softmax" in reasons(report), call.__name__


def test_a_head_that_nothing_reads_is_found_and_left_out():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            unread = self.attention(x[:, :1], x, x)[0]
            del unread
            return x.mean(1)

    report = against_eager(Pooled(), (torch.randn(2, 5, 16, requires_grad=True),), training=False, rewritten={})
    (site,) = (s for s in report.sites if s.kind == "attention")
    assert (site.decision, site.reason, site.module) == ("kept", "unused", "attention")
