"""Small inputs that broke other libraries' softmaxes and norms, through the whole pipeline."""

import math

import pytest
import torch
from torch.nn import functional

from precisionpass import Rule
from tests.agreement import compiled_step, counts, exact, relative, same, step

NORMS = [
    Rule(id="norms", match={"op": ["layer_norm", "rms_norm"]}, apply={"implementation": "auto", "lowering": "kernel"})
]


@pytest.mark.parametrize("kind", ["huge", "infinite", "ties", "all equal"])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_8_softmax_of_extremes(kind, function, backend):
    rules = [
        Rule(id="s", match={"op": ["softmax", "log_softmax"]}, apply={"implementation": "auto", "lowering": "kernel"})
    ]
    x = torch.randn(4, 9)
    x = {"huge": x * 1e14, "infinite": x.masked_fill(x > 1, -math.inf), "ties": x.round(), "all equal": x * 0}[kind]
    if kind == "infinite":
        x[0, 0], x[1] = math.inf, -math.inf

    def call(x):
        return function(x, -1)

    ours, report = compiled_step(call, x.requires_grad_(), rules=rules, backend=backend)
    assert len(report.sites) == 1 and report.sites[0].decision == "rewritten"
    same(ours, step(call, (x,)), 1e-6)


def test_10_rms_norm_of_small_values_without_an_eps():
    x = (0.058 * torch.randn(64, 32)).to(torch.bfloat16).requires_grad_()
    weight = torch.ones(32, dtype=torch.bfloat16, requires_grad=True)

    def call(x, weight):
        return functional.rms_norm(x, (32,), weight)

    ours, report = compiled_step(call, x, weight, rules=NORMS)
    (site,) = report.sites
    assert (site.kind, site.decision) == ("rms_norm", "rewritten")
    wide = x.detach().float()
    theirs = functional.rms_norm(wide, (32,), weight.detach().float(), eps=float(site.facts["eps"]))
    assert relative(ours.outputs[0], theirs) < 4e-3
    assert relative(ours.outputs[0], step(call, (x, weight)).outputs[0]) < 5e-3


@pytest.mark.parametrize(("offset", "spread"), [(2000, 1.0), (100, 0.01)])
@pytest.mark.parametrize("written", [False, True])
def test_11_layer_norm_of_a_large_mean(offset, spread, written):
    x = (torch.randn(8, 64) * spread + offset).requires_grad_()

    def call(x):
        if not written:
            return functional.layer_norm(x, (64,))
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)

    ours, report = compiled_step(call, x, rules=NORMS)
    assert counts(report) == {"layer_norm": 1}
    assert relative(ours.outputs[0], exact(call, x).outputs[0]) <= 1e-3


@pytest.mark.parametrize("written", [False, True])
def test_12_rms_norm_in_fp16_does_not_overflow(written):
    x = (torch.randn(4, 4096).sign() * 8000).to(torch.float16).requires_grad_()

    def call(x):
        if not written:
            return functional.rms_norm(x, (4096,), eps=1e-6)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    ours, report = compiled_step(call, x)
    assert counts(report) == {"rms_norm": 1} or not written, report.text()
    assert ours.outputs[0].isfinite().all() and ours.gradients["input 0"].isfinite().all()
    assert relative(ours.outputs[0], x.detach().sign()) < 1e-3
