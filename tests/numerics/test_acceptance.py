"""The acceptance table of NUMERICS 4 on the CPU reference: the default passes it, arithmetics that fail do not."""

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.numerics import arithmetics, generators
from precisionpass.numerics.bias import drift, exact, measure, t_statistic, through_op
from precisionpass.numerics.budgets import BIAS, DRIFT, OUTPUT, broken

attention = torch.ops.precisionpass.attention
SEEDS = (0, 1, 2)
FAILING = {
    "normaliser of unrounded P, delta of the rounded output": through_op(
        attention, normaliser="float32", delta="output"
    ),
    "the same with a fast exponential": arithmetics.fast_exponential,
    "all in 16 bits": arithmetics.all_sixteen_bit,
}


@pytest.mark.parametrize("name", generators.SHARP | generators.WIDE)
@pytest.mark.parametrize("delta", ["residual", "recompute"])
def test_the_default_and_its_escalation_keep_every_budget(name, delta):
    attend = through_op(attention, delta=delta)
    for seed in SEEDS if delta == "residual" else SEEDS[:1]:
        case = (generators.SHARP | generators.WIDE)[name](seed)
        assert broken(measure(case, attend(case)), sharp=name in generators.SHARP) == {}


def test_without_a_saved_residual_delta_is_recomputed_not_biased():
    case = generators.twin_sink(0)
    assert broken(measure(case, through_op(attention, save_residual=False)(case)), sharp=True) == {}


@pytest.mark.parametrize("name", generators.CONTROLS)
def test_the_controls_are_benign(name):
    """No bias, no alarm. rho is not held here: without a saturated row it measures the roundings of P, not a bias."""
    for seed in SEEDS:
        case = generators.CONTROLS[name](seed)
        outcome = through_op(attention)(case)
        measured = measure(case, outcome)
        assert measured.bias <= BIAS and measured.output <= OUTPUT and measured.nonfinite == 0
        assert not (abs(t_statistic(outcome.row_sum)) > 6 and measured.bias > 1e-5)


@pytest.mark.parametrize("name", generators.SHARP)
@pytest.mark.parametrize("arithmetic", FAILING)
def test_arithmetics_that_break_training_break_the_budgets(name, arithmetic):
    case = generators.SHARP[name](0)
    over = broken(measure(case, FAILING[arithmetic](case)), sharp=True)
    assert {"rho", "bias"} <= set(over), over


@pytest.mark.parametrize("name", [name for name in generators.WIDE if name != "G8"])
@pytest.mark.parametrize("arithmetic", FAILING)
def test_they_break_the_wide_budget_too(name, arithmetic):
    case = generators.WIDE[name](0)
    assert "rho" in broken(measure(case, FAILING[arithmetic](case)), sharp=False)


def test_the_drift_of_a_weight_stays_at_that_of_exact_arithmetic():
    """Measured: 7e-6 (default), 1.4e-2 (unrounded normaliser, delta of the output), .13 (fast exp), .23 (16 bits)."""
    assert drift(through_op(attention)) <= DRIFT


@pytest.mark.parametrize("arithmetic", FAILING)
def test_the_drift_of_a_failing_arithmetic_is_seen(arithmetic):
    assert drift(FAILING[arithmetic]) > 50 * DRIFT


def test_compiled_by_inductor_the_figures_are_the_same(no_cached_backward):
    """The roundings must survive a compiler that would elide them from a body it can see into."""
    compiled = torch.compile(lambda *tensors, **settings: attention(*tensors, **settings), backend="inductor")
    case = generators.twin_sink(0)
    assert measure(case, through_op(compiled)(case)) == measure(case, through_op(attention)(case))


def test_padding_gives_the_padding_value():
    """G5: 64 keys of one value score 6-9, so O is that value but for a weight of e^-6 on the others: one ulp."""
    case = generators.padding(0)
    output = through_op(attention)(case).output
    assert float(((output - case.v[:, :, -1:]).float().abs() / case.v[:, :, -1:].float().abs()).max()) <= 2.0**-7


def test_the_generators_are_what_they_say():
    twin = generators.twin_sink(0)
    assert torch.equal(twin.k[:, :, 0], twin.k[:, :, 1])
    truth = exact(twin)
    assert 9.9 < float(truth.row_max.min()) and float(truth.row_max.max()) < 14.1
    assert not torch.equal(generators.twin_sink(0, 1).v, twin.v) and torch.equal(generators.twin_sink(0).v, twin.v)
    first, later = generators.persistent_sink(0, 0), generators.persistent_sink(0, 1)
    assert torch.equal(first.v[:, :, 0], later.v[:, :, 0]) and not torch.equal(first.v[:, :, 1], later.v[:, :, 1])
    same = generators.constant_maximum(0)
    assert torch.equal(same.q, same.q[:1, :, :1].expand_as(same.q))
    assert abs(float(exact(same).row_max.mean()) - 20) < 0.1
    for m, sign in ((50, 1), (100, 1), (25, -1), (100, -1)):
        large = exact(generators.large_scores(0, m=m, sign=sign)).row_max
        assert abs(float(large.median()) - sign * m) < 1.5
    assert int(exact(generators.left_padding(0)).dead.sum()) > 48
