"""Norms in the spellings of many repositories: one site each, right when rewritten; what is almost one says why not."""

import pytest
import torch

from precisionpass import Rule
from tests.agreement import against_eager, reasons

KERNEL = [Rule(id="norms", match={"op": ["layer_norm", "rms_norm"]},
               apply={"implementation": "auto", "lowering": "kernel"})]  # fmt: skip
N = 16


def mean(x, **kept):
    return x.mean(-1, **(kept or {"keepdim": True}))


def flax(x, w):
    """Squares and mean in one pass, the variance kept from being negative, the weight in the inverse root."""
    centre = mean(x)
    spread = torch.relu(mean(x.square()) - centre * centre)
    return (x - centre) * (torch.rsqrt(spread + 1e-6) * w)


def pair_without_its_dimension(x, w):
    variance, centre = torch.var_mean(x, -1, correction=0)
    return (x - centre[..., None]) / torch.sqrt(variance + 1e-5).unsqueeze(-1) * w


def two_dimensions(x, w):
    x = x.unflatten(-1, (2, 8))
    return x * torch.rsqrt(x.pow(2).mean((2, 3)) + 1e-6)[..., None, None]


# name: (function of x [3, 5, N] and w [N], formula)
RMS, LAYER = "(x) / sqrt(mean(x^2) + {})", "(x - mean(x)) / sqrt(var(x) + {})"
SPELLINGS = {
    "length over root n": (lambda x, w: x / (x.norm(dim=-1, keepdim=True) * N**-0.5) * w, RMS.format(0) + " * w"),
    "linalg": (lambda x, w: x / (torch.linalg.norm(x, dim=-1, keepdim=True) / N**0.5), RMS.format(0)),
    "length squared": (
        lambda x, w: x * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / N + 1e-6) * w,
        RMS.format("1e-06") + " * w",
    ),
    "sum of squares": (lambda x, w: x / torch.sqrt((x * x).sum(-1, True) * (1 / N) + 1e-6), RMS.format("1e-06")),
    "einsum": (
        lambda x, w: x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / N + 1e-6) * w,
        RMS.format("1e-06") + " * w",
    ),
    "dimension put back last": (
        lambda x, w: x * (mean(x.pow(2), keepdim=False) + 1e-6).rsqrt()[..., None] * w,
        RMS.format("1e-06") + " * w",
    ),
    "two dimensions put back": (two_dimensions, RMS.format("1e-06")),
    "weight first": (lambda x, w: w * x * torch.rsqrt(mean(x.pow(2)) + 1e-6), RMS.format("1e-06") + " * w"),
    "weight in the root": (lambda x, w: x * (w * torch.rsqrt(mean(x.pow(2)) + 1e-6)), RMS.format("1e-06") + " * w"),
    "weight from one in the root": (
        lambda x, w: x * (torch.rsqrt(mean(x.pow(2)) + 1e-6) * (1 + w)),
        RMS.format("1e-06") + " * (1 + w)",
    ),
    "flax": (flax, LAYER.format("1e-06") + " * w"),
    "std": (lambda x, w: (x - mean(x)) / x.std(-1, unbiased=False, keepdim=True) * w, LAYER.format(0) + " * w"),
    "variance put back": (
        lambda x, w: (x - mean(x)) / (x.var(-1, correction=0)[..., None] + 1e-5) ** 0.5,
        LAYER.format("1e-05"),
    ),
    "pair": (pair_without_its_dimension, LAYER.format("1e-05") + " * w"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_is_found_rewritten_and_equal(name):
    function, formula = SPELLINGS[name]
    kind = "rms_norm" if formula.startswith("(x) /") else "layer_norm"
    inputs = (torch.randn(3, 5, N, requires_grad=True), torch.randn(N, requires_grad=True))
    report = against_eager(function, inputs, rules=KERNEL, rewritten={kind: 1})
    assert report.sites[0].formula == formula
    assert not report.near_misses


ALMOST = {
    "std": (lambda x: (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-6), "unbiased_variance"),
    "std without eps": (lambda x: (x - mean(x)) / x.std(-1, keepdim=True), "unbiased_variance"),
    "std and mean": (
        lambda x: (x - (pair := torch.std_mean(x, -1, keepdim=True))[1]) / (pair[0] + 1e-6),
        "unbiased_variance",
    ),
    "biased std": (lambda x: (x - mean(x)) / (x.std(-1, correction=0, keepdim=True) + 1e-6), "eps_outside_root"),
    "eps beside the root": (lambda x: x / (torch.sqrt(mean(x**2)) + 1e-6), "eps_outside_root"),
    "root kept from zero": (lambda x: x / torch.sqrt(mean(x**2)).clamp(min=1e-6), "eps_outside_root"),
    "inverse": (lambda x: (x - mean(x)) * (1 / (torch.sqrt(mean((x - mean(x)) ** 2)) + 1e-6)), "eps_outside_root"),
    "no mean taken away": (lambda x: x / x.std(-1, correction=0, keepdim=True), "uncentered"),
    "sum of squares": (lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6), "l2_normalise"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALMOST)
def test_is_a_near_miss(name):
    call, reason = ALMOST[name]
    report = against_eager(call, (torch.randn(3, 5, N, requires_grad=True),), rules=KERNEL, rewritten={})
    assert reasons(report) == {reason}
    assert len(report.near_misses) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * torch.rsqrt(x.std(-1, keepdim=True, correction=0) + 1e-6),
        lambda x: x * torch.rsqrt(x.norm(dim=-1, keepdim=True) / N**0.5 + 1e-6),
        lambda x: x / (x.norm(p=1, dim=-1, keepdim=True) / N**0.5),
        lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / (N - 1) + 1e-6),
        lambda x: x[0] * torch.rsqrt(x[0][:, :5].pow(2).mean(-1) + 1e-6)[:, None],
        lambda x: x[:, :, :5] * torch.rsqrt(x[:, :, :5].pow(2).mean(-1) + 1e-6).unsqueeze(1),
    ],
    ids=["root of a root", "length in a root", "sum of sizes", "n - 1", "a part", "another dimension"],
)
def test_looks_like_one_and_is_none(call):
    against_eager(call, (torch.randn(3, 5, N, requires_grad=True),), rules=KERNEL, rewritten={})
