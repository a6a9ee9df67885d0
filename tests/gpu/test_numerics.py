"""The acceptance table of the numerics on a GPU: the kernels keep every budget, on all generators and controls."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.numerics import generators
from precisionpass.numerics.bias import Case, Measured, Outcome, drift, measure, t_statistic, through_op
from precisionpass.numerics.budgets import BIAS, DRIFT, OUTPUT, broken
from precisionpass.numerics.formats import decode_residual

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SEEDS = (0, 1, 2)


def on_gpu(case: Case) -> Case:
    """The case with its tensors on the GPU."""
    tensors = {name: getattr(case, name).cuda() for name in ("q", "k", "v", "upstream", "x")}
    mask = None if case.mask is None else case.mask.cuda()
    return Case(case.name, **tensors, causal=case.causal, mask=mask)


def kernels(**settings):
    """The op, held to the kernels."""
    return through_op(torch.ops.precisionpass.attention, implementation="triton", **settings)


def hopper_kernels(case: Case) -> Outcome:
    """The op, held to the Hopper kernels. They take no bias, so rowsum dS is made here, in FP64 of what they saved."""
    if torch.cuda.get_device_capability() != (9, 0) or case.mask is not None:
        pytest.skip("no Hopper GPU, or a mask")
    q, k, v = (part.detach().requires_grad_() for part in (case.q, case.k, case.v))
    settings = {"scale": generators.SCALE, "causal": case.causal, "save_residual": True, "implementation": "hopper"}
    output, residual, lse, _, _ = torch.ops.precisionpass.attention(q, k, v, **settings)
    gradients = torch.autograd.grad(output, (q, k, v), case.upstream)
    wide_q, wide_k, wide_v, upstream = (part.detach().double() for part in (q, k, v, case.upstream))
    scores = wide_q @ wide_k.transpose(-1, -2) * generators.SCALE
    if case.causal != "none":
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    probabilities = (scores - lse.double().unsqueeze(-1)).exp()
    delta = (upstream * decode_residual(output.detach(), residual).double()).sum(-1, keepdim=True)
    row_sum = (probabilities * (upstream @ wide_v.transpose(-1, -2) - delta)).sum(-1)
    return Outcome(output.detach(), lse, row_sum, *gradients)


def over_budget(measured: Measured, *, sharp: bool) -> dict[str, tuple[float, float]]:
    """The figures over their budget. In training the log-sum-exp is that of the rounded P: within 2^-8, not FP32's."""
    over = broken(measured, sharp=sharp)
    if measured.row_sum_p <= 2.0**-8 and 10 * measured.lse <= 2.0**-8:
        over.pop("row_sum_p", None)
        over.pop("lse", None)
    return over


@pytest.mark.parametrize("delta", ["residual", "recompute"])
@pytest.mark.parametrize("name", generators.SHARP | generators.WIDE)
def test_the_kernels_keep_every_budget(name, delta):
    for seed in SEEDS:
        case = on_gpu((generators.SHARP | generators.WIDE)[name](seed))
        measured = measure(case, kernels(delta=delta)(case))
        print(name, delta, seed, measured)
        assert over_budget(measured, sharp=name in generators.SHARP) == {}


@pytest.mark.parametrize("attend", [kernels(), hopper_kernels], ids=["triton", "hopper"])
@pytest.mark.parametrize(("width", "length"), [(64, 128), (128, 128), (64, 4096), (128, 4096)])
@pytest.mark.parametrize("name", generators.SHARP | generators.WIDE)
def test_longer_and_wider_they_keep_them_too(name, width, length, attend, monkeypatch):
    """The same constructions at other sizes; the scale stays 1/8, so that a sink scores the same."""
    monkeypatch.setattr(generators, "WIDTH", width)
    monkeypatch.setattr(generators, "LENGTH", length)
    case = on_gpu((generators.SHARP | generators.WIDE)[name](0, sequences=32 if length == 128 else 4))
    measured = measure(case, attend(case))
    print(name, width, length, measured)
    assert over_budget(measured, sharp=name in generators.SHARP) == {}


@pytest.mark.parametrize("name", generators.CONTROLS)
def test_the_controls_are_benign(name):
    for seed in SEEDS:
        case = on_gpu(generators.CONTROLS[name](seed))
        outcome = kernels()(case)
        measured = measure(case, outcome)
        print(name, seed, measured)
        assert measured.bias <= BIAS and measured.output <= OUTPUT and measured.nonfinite == 0
        assert not (abs(t_statistic(outcome.row_sum)) > 6 and measured.bias > 1e-5)


def test_the_drift_of_a_weight_stays_at_that_of_exact_arithmetic():
    def attend(case: Case):
        outcome = kernels()(on_gpu(case))
        return type(outcome)(**{name: getattr(outcome, name).cpu() for name in outcome.__dataclass_fields__})

    found = drift(attend)
    print("drift", found)
    assert found <= DRIFT


def test_without_the_method_the_budgets_break():
    """The same kernels with the normaliser of unrounded P and delta of the rounded output: what the tests can see."""
    case = on_gpu(generators.twin_sink(0))
    measured = measure(case, kernels(normaliser="float32", delta="output")(case))
    print("without", measured)
    assert {"rho", "bias"} <= set(over_budget(measured, sharp=True))


def test_the_residual_of_the_kernels_is_that_of_the_specification():
    from tests.kernels.check_residual import faults

    assert faults("cuda") == []
