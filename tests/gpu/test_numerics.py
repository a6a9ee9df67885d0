"""The acceptance table of the numerics on a GPU: the kernels keep every budget, on all generators and controls."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.numerics import generators
from precisionpass.numerics.bias import Case, drift, measure, t_statistic, through_op
from precisionpass.numerics.budgets import BIAS, DRIFT, OUTPUT, broken

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


@pytest.mark.parametrize("delta", ["residual", "recompute"])
@pytest.mark.parametrize("name", generators.SHARP | generators.WIDE)
def test_the_kernels_keep_every_budget(name, delta):
    for seed in SEEDS:
        case = on_gpu((generators.SHARP | generators.WIDE)[name](seed))
        measured = measure(case, kernels(delta=delta)(case))
        print(name, delta, seed, measured)
        assert broken(measured, sharp=name in generators.SHARP) == {}


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
    assert {"rho", "bias"} <= set(broken(measured, sharp=True))
