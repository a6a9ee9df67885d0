"""Recording on a GPU: the reference's figures, no bit of the result changed, and no waiting for the device."""

import pytest
import torch

from precisionpass.hooks.escalation import Escalation
from precisionpass.hooks.figures import RECORDS
from precisionpass.hooks.monitor import Monitor
from precisionpass.hooks.recorder import Recorder
from precisionpass.numerics import generators
from precisionpass.numerics.generators import SCALE
from precisionpass.rules.groups import figures_of
from tests.gpu.test_numerics import on_gpu

pytest.importorskip("triton")

from tests.kernels.cases import CASES
from tests.kernels.check_figures import differences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

attention = torch.ops.precisionpass.attention
NAMES = ("causal", "grouped", "odd widths", "window", "sinks by head", "dropout", "recompute", "packed", "lse gradient")


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_record_what_the_reference_does(name):
    for settings in ({}, {"delta": "output"}):
        errors = differences(CASES[name], torch.bfloat16, "cuda", **settings)
        assert all(value < 3 for value in errors.values()), errors  # magnitudes of gradients by a unit or two


def tensors():
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(4, 256, 8, 64, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    ]


def step(inputs, upstream, **settings):
    output = attention(*inputs, causal="top_left", scale=0.125, save_residual=True, **settings)[0]
    return [output, *torch.autograd.grad(output, inputs, upstream)]


def test_no_bit_changes_and_nothing_waits_for_the_device():
    q, k, v, upstream = tensors()
    inputs = [part.requires_grad_() for part in (q, k, v)]
    recorder = Recorder()
    handle = recorder.handle("site", tuple(RECORDS))
    plain, first = step(inputs, upstream), step(inputs, upstream, record=handle)
    assert all(torch.equal(one, two) for one, two in zip(plain, first, strict=True))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(inputs, upstream, record=handle)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    figures = Monitor(recorder).read()["site"]
    assert figures["sequences"] == 16 and figures["nonfinite_gradients"] == 0
    assert figures["amax_q"] == pytest.approx(float(q.detach().abs().max()))
    scores = (q.float() @ k.float().mT * 0.125).masked_fill(torch.ones(256, 256, device="cuda").triu(1).bool(), -1e9)
    assert figures["max_logit"] == pytest.approx(float(scores.max()), rel=1e-4)


def test_the_bias_is_recorded_where_kernels_of_one_gpu_generation_compute_otherwise():
    """4096 rows of 128: on Hopper GPUs other kernels, which leave no row sums."""
    inputs = [torch.randn(1, 4096, 4, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    inputs = [part.requires_grad_() for part in inputs]
    found = []
    for implementation in ("auto", "triton"):
        recorder = Recorder()
        handle = recorder.handle("site", ["delta_bias"])
        step(inputs, torch.ones_like(inputs[0]), record=handle, implementation=implementation, delta="output")
        found.append(Monitor(recorder).read()["site"]["delta_bias"])
    # Of one upstream gradient, and of outputs that the forwards round apart here and there.
    assert found[1] > 0 and found[0] == pytest.approx(found[1], rel=0.5)


def test_an_escalation_tells_without_waiting():
    recorder = Recorder()
    handle = recorder.handle("site", ["delta_bias"])
    when = figures_of("delta_bias_t > 6 and delta_bias > 1e-5")
    safer = Escalation(when, {"delta": "recompute", "normaliser": "rounded"}, "recompute", hold=1000, window=128)
    recorder.site("site").escalate(safer, torch.device("cuda"))
    settings = {"normaliser": "float32", "delta": "output", "record": handle, "implementation": "triton"}
    cases = [on_gpu(generators.persistent_sink(0, number)) for number in range(4)]
    monitor = Monitor(recorder)
    for number in range(8):
        case = cases[number % 4]
        inputs = [part.detach().requires_grad_() for part in (case.q, case.k, case.v)]
        torch.cuda.synchronize()  # so that what was copied has arrived: here, and not in the step
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = attention(*inputs, scale=SCALE, **settings)[0]
            torch.autograd.grad(output, inputs, case.upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    (event,) = monitor.events
    assert event.escalated and event.step in (4, 5)
