"""The acceptance table of the numerics on a GPU: the kernels keep every budget, on all generators and controls."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.numerics import generators
from precisionpass.numerics.bias import Case, Measured, drift, measure, t_statistic, through_op
from precisionpass.numerics.budgets import BIAS, DRIFT, OUTPUT, broken

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SEEDS = (0, 1, 2)


def on_gpu(case: Case) -> Case:
    """The case with its tensors on the GPU."""
    tensors = {name: getattr(case, name).cuda() for name in ("q", "k", "v", "upstream", "x")}
    mask = None if case.mask is None else case.mask.cuda()
    return Case(case.name, **tensors, causal=case.causal, mask=mask)


def kernels(implementation="triton", **settings):
    """The op, held to the kernels."""
    return through_op(torch.ops.precisionpass.attention, implementation=implementation, **settings)


def skip_where_there_are_none(implementation: str, case: Case) -> None:
    if implementation == "hopper" and (torch.cuda.get_device_capability() != (9, 0) or case.mask is not None):
        pytest.skip("no Hopper GPU, or a mask")


def over_budget(measured: Measured, *, sharp: bool) -> dict[str, tuple[float, float]]:
    """The figures over their budget. In training the log-sum-exp is that of the rounded P: within 2^-8, not FP32's."""
    over = broken(measured, sharp=sharp)
    if measured.row_sum_p <= 2.0**-8 and 10 * measured.lse <= 2.0**-8:
        over.pop("row_sum_p", None)
        over.pop("lse", None)
    return over


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("delta", ["residual", "recompute"])
@pytest.mark.parametrize("name", generators.SHARP | generators.WIDE)
def test_the_kernels_keep_every_budget(name, delta, implementation):
    for seed in SEEDS:
        case = on_gpu((generators.SHARP | generators.WIDE)[name](seed))
        skip_where_there_are_none(implementation, case)
        measured = measure(case, kernels(implementation, delta=delta)(case))
        print(name, delta, seed, measured)
        assert over_budget(measured, sharp=name in generators.SHARP) == {}


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize(("width", "length"), [(128, 128), (64, 4096), (128, 4096)])
@pytest.mark.parametrize("name", generators.SHARP | generators.WIDE)
def test_longer_and_wider_they_keep_them_too(name, width, length, implementation, monkeypatch):
    """The same constructions at other sizes; the scale stays 1/8, so that a sink scores the same."""
    monkeypatch.setattr(generators, "WIDTH", width)
    monkeypatch.setattr(generators, "LENGTH", length)
    case = on_gpu((generators.SHARP | generators.WIDE)[name](0, sequences=32 if length == 128 else 4))
    skip_where_there_are_none(implementation, case)
    measured = measure(case, kernels(implementation)(case))
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
