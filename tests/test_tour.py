"""The product in 100 lines, and the first test to run: look at a model, compile it, train it, read the review."""

import math

import pytest
import torch
from torch import nn

import precisionpass


class Attention(nn.Module):
    """Causal attention, written out as most models do."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(ahead, -math.inf).softmax(-1)
        return self.out((probabilities @ v).transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    """Two blocks of norm and attention, a third norm, and a gate whose softmax is no attention."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), Attention()) for _ in range(2))
        self.norm, self.gate = nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x) * self.gate(x).softmax(-1)


@pytest.fixture
def model() -> Model:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_look_first(model):
    """A dry run: every place with its exact name, what would be done there, by which rule, and why not otherwise."""
    report = precisionpass.explain(model, (x,), rules="stable-bf16")
    told = [(site.kind, site.module, site.decision, site.reason) for site in report.sites]
    assert told == [
        ("layer_norm", "blocks.0.0", "kept", "already_satisfied"),
        ("attention", "blocks.0.1", "rewritten", "rewritten"),
        ("layer_norm", "blocks.1.0", "kept", "already_satisfied"),
        ("attention", "blocks.1.1", "rewritten", "rewritten"),
        ("rms_norm", "norm", "kept", "already_satisfied"),
        ("softmax", "", "kept", "already_satisfied"),
    ]
    site = report.sites[1]
    assert (site.rule, site.facts["dtype"], site.facts["heads"], site.facts["causal"]) == (
        "attention-unbiased",
        "bf16",
        4,
        True,
    )
    assert site.source.startswith("tests/test_tour.py:")
    assert "2 attention sites rewritten" in str(report)
    assert not precisionpass.is_active(model)


def test_compile_and_train(model, tmp_path):
    """One line around the model; weight names stay; the loss falls; the review folder can be opened in a browser."""
    names = list(model.state_dict())
    model = precisionpass.compile(model, rules="stable-bf16", review=str(tmp_path), backend="aot_eager")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        losses.append(model(x).float().square().mean())
        losses[-1].backward()
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < losses[0]
    assert list(model.state_dict()) == names
    assert precisionpass.is_active(model)
    assert precisionpass.report(model).to_json() == precisionpass.explain(model, (x,)).to_json()
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")


def test_say_it_in_rules(model):
    """Leave one module alone, change the others: the first rule that sets a setting wins."""
    first = {"op": "attention", "module": "blocks.0.*"}
    rules = [
        precisionpass.Rule(id="not-the-first", match=first, apply={"implementation": "keep"}),
        precisionpass.Rule(id="all", match={"op": "attention"}, apply={"implementation": "auto"}),
    ]
    sites = [site for site in precisionpass.explain(model, (x,), rules=rules).sites if site.kind == "attention"]
    assert [(site.decision, site.rule) for site in sites] == [("kept", "not-the-first"), ("rewritten", "all")]


def test_off_is_off(model):
    """With rules="off" the result is that of torch.compile alone, bit for bit."""
    alone = torch.compile(model, backend="aot_eager")(x)
    torch._dynamo.reset()
    assert torch.equal(precisionpass.compile(model, rules="off", backend="aot_eager")(x), alone)


def test_a_mistake_is_answered_before_torch_runs(model):
    with pytest.raises(precisionpass.PrecisionPassError, match=r"did you mean .stable-bf16.\?"):
        precisionpass.compile(model, rules="stabel-bf16")
