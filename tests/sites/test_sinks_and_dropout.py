"""A sink's column and dropout: what is one attention, and what only looks like it."""

import torch
import torch.nn.functional as F

import precisionpass
from tests.agreement import against_eager, reasons

B, H, S, D = 2, 3, 7, 8


def qkv():
    return [torch.randn(B, H, S, D, requires_grad=True) for _ in range(3)]


def with_column(q, k):
    return torch.cat([q @ k.mT * 0.3, torch.zeros(B, H, S, 1)], -1).softmax(-1)


def test_a_sink_with_a_value_of_its_own_is_right():
    """The extra column is multiplied with an extra row of V: it must not be dropped."""

    def call(q, k, v):
        return with_column(q, k) @ torch.cat([v, torch.ones(B, H, 1, D)], 2)

    against_eager(call, qkv())


def test_probabilities_returned_with_the_sink_are_right():
    def call(q, k, v):
        p = with_column(q, k)
        return p[..., :-1] @ v, p

    against_eager(call, qkv())


def test_another_slice_of_the_probabilities_is_right():
    def call(q, k, v):
        return with_column(q, k)[..., 1:] @ v

    against_eager(call, qkv())


def test_dropout_twice_is_refused():
    def call(q, k, v):
        return F.dropout(F.dropout((q @ k.mT).softmax(-1), 0.5), 0.25) @ v

    torch._dynamo.reset()
    report = precisionpass.explain(call, tuple(qkv()))
    assert "mixed_after_softmax" in reasons(report)


def test_dropout_of_whole_channels_is_refused():
    def call(q, k, v):
        return F.dropout2d((q @ k.mT).softmax(-1), 0.5) @ v

    torch._dynamo.reset()
    report = precisionpass.explain(call, tuple(qkv()))
    assert "mixed_after_softmax" in reasons(report)
