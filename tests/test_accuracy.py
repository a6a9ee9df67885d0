"""BF16 gradients of whole models against float64: with precisionpass never worse than without, over 16 seeds.

For each seed: new random weights and inputs, rounded to BF16; the float64 run has the same rounded weights. Errors are
||g - g64|| / ||g64||. The ratio of two errors has a spread of its own, so means are held within their confidence.
"""

import copy
import math
import statistics

import pytest
import torch

import precisionpass
from tests.agreement import Step, exact, in_float64, relative, step
from tests.small_models import FAMILIES, family

SEEDS = 16
T_95 = 2.131  # Student's t for 15 degrees of freedom


def confidence(ratios: list[float]) -> tuple[float, float, float]:
    """(geometric mean, lower and upper end of its 95 % confidence interval)."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), T_95 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def total_error(found: Step, truth: Step) -> float:
    """Of all gradients as one vector."""
    errors = [(found.gradients[name].double() - true).square().sum() for name, true in truth.gradients.items()]
    return float((sum(errors) / sum(true.square().sum() for true in truth.gradients.values())).sqrt())


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Matrices with the spread of a trained model's, so that attention is not uniform."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        scale = 1.5 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.1
        parameter.data.copy_(noise * scale + (1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0))


@pytest.mark.parametrize(("name", "attention"), [(n, a) for n in FAMILIES for a in ("eager", "sdpa")])
def test_bf16_gradients_are_no_worse(name, attention, record_property):
    torch._dynamo.reset()
    model, _ = family(name, attention, layers=1 if name == "t5" else 2)  # t5's layers are an encoder's and a decoder's
    start = copy.deepcopy(model.state_dict())
    model.to(torch.bfloat16)
    compiled = precisionpass.compile(copy.deepcopy(model), backend="aot_eager")
    totals, parameters = [], {}
    for seed in range(SEEDS):
        model.load_state_dict(start)
        draw_weights(model, seed)
        compiled.load_state_dict(model.state_dict())
        _, kwargs = family(name, attention, layers=1)
        kwargs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in kwargs.items()}
        truth = in_float64(model, (), kwargs)
        ours, theirs = step(compiled, kwargs=kwargs), step(model, kwargs=kwargs)
        totals.append(total_error(ours, truth) / total_error(theirs, truth))
        for parameter, true in truth.gradients.items():
            if true.norm() > 1e-6 * theirs.gradients[parameter].norm():  # not zero in exact arithmetic
                ratio = relative(ours.gradients[parameter], true) / relative(theirs.gradients[parameter], true)
                parameters.setdefault(parameter, []).append(ratio)
    mean, low, high = confidence(totals)
    medians = {parameter: statistics.median(ratios) for parameter, ratios in parameters.items()}
    worst = max(medians, key=medians.get)
    record_property("figures", f"{mean:.3f} [{low:.3f}, {high:.3f}], worst median {medians[worst]:.3f} {worst}")
    print(f"{name} {attention}: {mean:.3f} [{low:.3f}, {high:.3f}], worst median {medians[worst]:.3f} ({worst})")
    assert low <= 1.0, f"total gradient error is {mean:.3f} [{low:.3f}, {high:.3f}] times eager's"
    assert medians[worst] <= 1.15, f"{worst}: median {medians[worst]:.3f} times eager's error"


def attend(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -math.inf).softmax(-1) @ v


def attend_in_fp32(q, k, v):
    """With the softmax in FP32 and a cast back, as most models write it."""
    scores = (
        (q @ k.mT / math.sqrt(q.shape[-1])).float() if q.dtype != torch.float64 else q @ k.mT / math.sqrt(q.shape[-1])
    )
    return scores.softmax(-1).to(v.dtype) @ v


def sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def product_in_fp32(q, k, v):
    scale = math.sqrt(q.shape[-1])
    if q.dtype == torch.float64:
        return (q @ k.mT / scale).softmax(-1) @ v
    return (q.float() @ k.float().mT / scale).softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize(
    "call",
    [attend, attend_in_fp32, sdpa, product_in_fp32],
    ids=lambda call: call.__name__,
)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_attention_alone_on_identical_inputs(call, spread):
    """The same q, k, v and dO: output, dq, dk and dv each at most as far from float64 as eager's."""
    torch._dynamo.reset()
    compiled = precisionpass.compile(call, backend="aot_eager")
    ratios: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        q, k, v = ((torch.randn(2, 4, 48, 32) * s).to(torch.bfloat16).requires_grad_() for s in (spread, spread, 1.0))
        ours, theirs, truth = step(compiled, (q, k, v)), step(call, (q, k, v)), exact(call, q, k, v)
        found = {"output": (ours.outputs[0], theirs.outputs[0], truth.outputs[0])}
        found |= {n: (ours.gradients[n], theirs.gradients[n], truth.gradients[n]) for n in truth.gradients}
        for part, (our, their, true) in found.items():
            ratios.setdefault(part, []).append(relative(our, true) / relative(their, true))
    figures = {part: confidence(each) for part, each in ratios.items()}
    print(call.__name__, spread, {part: f"{m:.3f} [{lo:.3f}, {hi:.3f}]" for part, (m, lo, hi) in figures.items()})
    for part, (mean, low, high) in figures.items():
        assert mean <= 1.0, f"{part}: {mean:.3f} [{low:.3f}, {high:.3f}] times eager's error"
