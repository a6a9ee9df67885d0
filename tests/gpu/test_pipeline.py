"""The whole pipeline on a GPU: found, rewritten, compiled by Inductor, computed by the kernels, as exact as eager."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

import precisionpass
from tests.small_models import FAMILIES, family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def moved(leaf, dtype):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to("cuda", dtype if leaf.is_floating_point() else None)


def step(model: torch.nn.Module, kwargs: dict) -> dict[str, torch.Tensor]:
    """Gradients of every parameter for a fixed random sum of the first output."""
    model.zero_grad()
    output = tree_leaves(model(**kwargs))[0]
    weights = torch.Generator("cuda").manual_seed(7)
    readout = torch.randn(output.shape, generator=weights, device="cuda", dtype=torch.float64)
    (output.double() * readout).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def total_error(found: dict, exact: dict) -> float:
    """Of all gradients together: ||found - exact|| / ||exact||."""
    wrong = sum(float((found[name].double() - exact[name]).square().sum()) for name in exact)
    return (wrong / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step(name):
    torch.manual_seed(0)
    model, kwargs = family(name, "eager")
    model = model.cuda().bfloat16().train()
    kwargs = tree_map(lambda leaf: moved(leaf, torch.bfloat16), kwargs)
    wide = tree_map(lambda leaf: moved(leaf, torch.float64), kwargs)
    exact = step(copy.deepcopy(model).double(), wide)
    eager = step(copy.deepcopy(model), kwargs)
    compiled = precisionpass.compile(model, rules="stable-bf16")
    ours = step(compiled, kwargs)
    assert total_error(ours, exact) <= 1.15 * total_error(eager, exact)
    rewritten = sum(s.count for s in precisionpass.report(compiled).sites if s.decision == "rewritten")
    assert rewritten > 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(compiled, kwargs)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts["precisionpass::attention"] == rewritten
    assert any("attention_forward" in key and not key.startswith("precisionpass::") for key in counts), sorted(counts)
