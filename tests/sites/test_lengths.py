"""Rows divided by their length are near misses, each with its reason."""

import pytest
import torch
import torch.nn.functional as F

import precisionpass

ALMOST = {
    "l2_normalise": lambda x: F.normalize(x, dim=-1) * 4.0,
    "eps_outside_root": lambda x: x / (x.norm(dim=-1, keepdim=True) * 0.25 + 1e-8),
}


@pytest.mark.parametrize("reason", ALMOST)
def test_is_a_near_miss(reason):
    torch._dynamo.reset()
    report = precisionpass.explain(ALMOST[reason], (torch.randn(3, 16),))
    assert [(miss.kind, miss.reason) for miss in report.near_misses] == [("rms_norm", reason)]
    assert not report.sites


def test_another_tensors_length_is_none():
    torch._dynamo.reset()
    report = precisionpass.explain(
        lambda x, y: x / y.norm(dim=-1, keepdim=True), (torch.randn(3, 16), torch.randn(3, 16))
    )
    assert not report.near_misses
