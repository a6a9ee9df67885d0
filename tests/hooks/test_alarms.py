"""The alarm fires on inputs and arithmetics that break training, and on nothing else (docs/monitors.md)."""

import warnings

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.errors import PrecisionPassError
from precisionpass.hooks.monitor import Monitor
from precisionpass.hooks.recorder import Recorder
from precisionpass.numerics import arithmetics, generators
from precisionpass.numerics.generators import SCALE

attention, observe = torch.ops.precisionpass.attention, torch.ops.precisionpass.observe
SEEDS = (0, 1, 2)
FUSED = {"normaliser": "float32", "delta": "output"}


def through_op(case, handle, **settings):
    q, k, v = (part.detach().requires_grad_() for part in (case.q, case.k, case.v))
    options = {"scale": SCALE, "causal": case.causal, "save_residual": True, "record": handle} | settings
    return attention(q, k, v, None, case.mask, **options)[0]


def of_a_fast_exponential(case, handle):
    """What a fused kernel with a fast exp gives, watched."""
    output = arithmetics.fast_exponential(case).output.requires_grad_()
    settings = {"scale": SCALE, "causal": case.causal, "record": handle}
    return observe(output, case.q, case.k, case.v, None, case.mask, **settings)


def after(generator, seed, attend, sequences=128, **settings):
    """The monitor after so many sequences, 32 a step."""
    recorder = Recorder()
    handle = recorder.handle("site", ["delta_bias", "row_sum"])
    for step in range(sequences // 32):
        case = generator(seed, step)
        attend(case, handle, **settings).backward(case.upstream)
    return Monitor(recorder)


def fired(monitor):
    return [(alarm.site, alarm.kind) for alarm in monitor.alarms()]


@pytest.mark.parametrize("name", ["G1", "G2", "G3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fused_kernel_with_a_fast_exponential_is_told(name, seed):
    assert fired(after(generators.SHARP[name], seed, of_a_fast_exponential)) == [("site", "delta_bias")]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fused_kernel_on_a_persistent_sink_is_told(seed):
    assert fired(after(generators.persistent_sink, seed, through_op, **FUSED)) == [("site", "delta_bias")]


@pytest.mark.parametrize("name", generators.CONTROLS)
@pytest.mark.parametrize("attend", [of_a_fast_exponential, lambda *a: through_op(*a, **FUSED)], ids=["fast", "fused"])
def test_no_alarm_on_the_controls(name, attend):
    assert [fired(after(generators.CONTROLS[name], seed, attend)) for seed in SEEDS] == [[]] * 3


@pytest.mark.parametrize("name", ["G1", "G2", "G3", "G8"])
def test_no_alarm_where_the_default_computes(name):
    assert fired(after((generators.SHARP | generators.WIDE)[name], 0, through_op)) == []


def test_fewer_sequences_than_a_sample_raise_no_alarm():
    monitor = after(generators.persistent_sink, 0, through_op, sequences=96, **FUSED)
    figures = monitor.read()["site"]
    assert figures["delta_bias"] > 1e-5 and figures["delta_bias_t"] > 6 and fired(monitor) == []


def test_check_raises_or_warns_and_names_the_site():
    monitor = after(generators.persistent_sink, 0, through_op, **FUSED)
    with pytest.raises(PrecisionPassError, match=r"PP501 1 alarm: the gradient has a bias of 7\.1e-05") as raised:
        monitor.check()
    assert raised.value.where == "site" and "delta: residual" in raised.value.fix
    with pytest.warns(UserWarning, match="precisionpass: site: the gradient has a bias of"):
        assert len(monitor.check("warn")) == 1
    monitor.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.check() == []


def test_a_row_that_misses_one_is_told():
    """An lse that is off by 0.01 makes every row of P sum to e^0.01."""
    recorder = Recorder()
    handle = recorder.handle("site", ["row_sum"])
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    output, residual, lse, _, _ = attention(q, k, v)
    for error, alarm in ((0.0, []), (0.01, [("site", "row_sum")])):
        torch.ops.precisionpass.attention_backward(
            output, None, None, output, residual, lse + error, q, k, v, None, None, None, [], None, None, None,
            [True] * 3 + [False] * 2, record=handle,
        )  # fmt: skip
        assert fired(Monitor(recorder)) == alarm
