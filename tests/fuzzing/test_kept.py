"""What the fuzz has found once, kept as tests."""

import torch

from precisionpass import Rule
from tests.agreement import against_eager

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
