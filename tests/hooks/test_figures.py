"""Each figure against what a person would compute from the whole matrix of scores."""

import math
from typing import get_args

import pytest
import torch

import precisionpass.ops  # noqa: F401
from precisionpass.errors import PrecisionPassError
from precisionpass.hooks.figures import FIGURES, RECORDS, ROWS, WHOLE
from precisionpass.hooks.monitor import Monitor
from precisionpass.hooks.recorder import Recorder, find
from precisionpass.rules import groups

attention = torch.ops.precisionpass.attention


def recorded(call, records=tuple(RECORDS)):
    """The figures after call(handle)."""
    recorder = Recorder()
    call(recorder.handle("a.b", records))
    return Monitor(recorder).read()["a.b"]


def step(handle, q, k, v, upstream=None, **options):
    tensors = [part.detach().requires_grad_() for part in (q, k, v)]
    output = attention(*tensors, record=handle, **options)[0]
    torch.autograd.grad(output, tensors, torch.ones_like(output) if upstream is None else upstream)


def tensors(dtype=torch.float32, heads=3, key_heads=3):
    torch.manual_seed(0)
    return [torch.randn(2, count, 9, 8).to(dtype) for count in (heads, key_heads, key_heads)]


def test_the_words_of_the_rules_are_those_of_the_figures():
    assert get_args(groups.Record) == tuple(RECORDS)
    assert {figure.record for figure in FIGURES.values()} == set(RECORDS) and set(WHOLE) < set(ROWS)


@pytest.mark.parametrize("forward", [False, True])
def test_scores_and_probabilities(forward):
    q, k, v = tensors()
    k[:, 1, 2] = k[:, 1, 4] = 4 * q[:, 1, 6]  # a maximum that repeats, in one head
    scores = (q.double() @ k.double().mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    options = {"causal": "top_left", "record_forward": forward}
    figures = recorded(lambda handle: step(handle, q, k, v, **options) if not forward else attention(
        q, k, v, record=handle, **options))  # fmt: skip
    largest = scores.amax((0, 2, 3))
    assert figures["max_logit_by_head"] == pytest.approx(largest.tolist(), rel=1e-6)
    assert figures["max_logit"] == pytest.approx(float(largest.max()), rel=1e-6)
    assert figures["entropy"] == pytest.approx(float(torch.special.entr(scores.softmax(-1)).sum(-1).mean()), rel=1e-5)
    repeats = (scores == scores.amax(-1, keepdim=True)).sum(-1) > 1
    assert 0 < figures["repeated_maxima"] == pytest.approx(float(repeats.double().mean()))
    assert figures["sequences"] == 2 and figures["amax_k"] == pytest.approx(float(k.abs().max()))
    assert ("row_sum_error" in figures) is ("amax_grad_q" in figures) is ("delta_bias" in figures) is not forward


def test_the_bias_is_that_of_rowsum_ds():
    q, k, v = tensors(torch.bfloat16)
    upstream = torch.randn_like(v)
    options = {"delta": "output", "normaliser": "float32"}
    level = torch.zeros(2, 3, 9, 1, requires_grad=True)
    output = attention(q, k, v, level, **options)[0]
    (row_sum,) = torch.autograd.grad(output, level, upstream)
    output = output.detach()
    figures = recorded(lambda handle: step(handle, q, k, v, upstream, **options))
    by_head = row_sum.double().sum((0, 2, 3)).abs() / (upstream.double() * output.double()).abs().sum((0, 2, 3))
    head = int((by_head - figures["delta_bias"]).abs().argmin())
    assert figures["delta_bias"] == pytest.approx(float(by_head[head]), rel=1e-4)
    sums = row_sum.double()[:, head].sum((1, 2))
    t = abs(float(sums.mean() / (sums.std() / 2**0.5)))
    assert figures["delta_bias_t"] == pytest.approx(t, rel=1e-4)


def test_a_gradient_of_the_lse_and_a_sink_are_no_bias():
    q, k, v = (part.double().requires_grad_() for part in tensors())
    sinks = torch.ones(1, 3, 1, 1, dtype=torch.float64)

    def call(handle):
        output, _, lse, _, _ = attention(q, k, v, sinks=sinks, record=handle)
        torch.autograd.grad((output, lse), (q, k, v), (torch.ones_like(output), torch.ones_like(lse)))

    assert recorded(call)["delta_bias"] < 1e-12


def test_what_clips_touch_is_counted():
    q, k, v = tensors()
    options = {"logit_clip": "hard", "logit_clip_max": 2.0, "output_clip": 0.5, "grad_clip": 0.1}
    figures = recorded(lambda handle: step(handle, q, k, v, grad_clip_kind="value", **options))
    scores = q @ k.mT
    output = (scores.clamp(-2, 2).softmax(-1) @ v).clamp(-0.5, 0.5)
    assert figures["clipped_logits"] == int((scores.abs() > 2).sum())
    assert figures["clipped_outputs"] == int((output.abs() >= 0.5).sum())
    free = [part.detach().requires_grad_() for part in (q, k, v)]
    attend = attention(*free, logit_clip="hard", logit_clip_max=2.0, output_clip=0.5)[0]
    gradients = torch.autograd.grad(attend.sum(), free)
    assert figures["clipped_gradients"] == sum(int((gradient.abs() > 0.1).sum()) for gradient in gradients)
    assert figures["amax_grad_q"] == pytest.approx(float(gradients[0].abs().max())), "as it was before the clip"


def test_what_is_not_finite_is_counted_and_spoils_no_other_figure():
    q, k, v = tensors()
    upstream = torch.ones_like(q)
    upstream[0, 0, 2, 3] = math.inf
    v[1, 1, 0, 0] = math.nan
    figures = recorded(lambda handle: step(handle, q, k, v, upstream, causal="top_left"))
    assert figures["nonfinite_outputs"] == 9 and figures["nonfinite_gradients"] > 0
    assert all(math.isfinite(value) for name, value in figures.items() if isinstance(value, float))


def test_a_forward_without_a_backward_does_not_dilute_the_bias():
    q, k, v = tensors(torch.bfloat16)

    def both(handle, forwards):
        step(handle, q, k, v, delta="output")
        for _ in range(forwards):
            attention(q, k, v, record=handle, record_forward=True)

    alone, mixed = (recorded(lambda handle, count=count: both(handle, count)) for count in (0, 20))
    assert (mixed["sequences"], mixed["bias_sequences"], alone["bias_sequences"]) == (42, 2, 2)
    assert mixed["delta_bias_t"] == alone["delta_bias_t"] > 0 and mixed["delta_bias"] == alone["delta_bias"]


def test_grouped_keys_and_packed_sequences():
    q, k, v = tensors(heads=4, key_heads=2)
    assert recorded(lambda handle: step(handle, q, k, v))["amax_grad_k"] > 0
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    figures = recorded(lambda handle: step(handle, q[:1], k[:1], v[:1], **packed))
    assert figures["sequences"] == 2 and figures["delta_bias"] < 1e-5


def test_figures_add_up_until_a_reset_and_go_with_a_checkpoint():
    q, k, v = tensors()
    recorder = Recorder()
    handle, monitor = recorder.handle("a.b", tuple(RECORDS)), Monitor(recorder)
    assert monitor.read() == {"a.b": {"sequences": 0}}
    for _ in range(3):
        step(handle, q, k, v)
    thrice = monitor.read()["a.b"]
    assert thrice["sequences"] == 6
    other = Recorder()
    Monitor(other).load_state_dict(monitor.state_dict())
    other.handle("a.b", tuple(RECORDS))
    assert Monitor(other).read()["a.b"] == thrice
    step(f"{other.name}/a.b", q, k, v)
    assert Monitor(other).read()["a.b"]["sequences"] == 8 and monitor.read()["a.b"]["sequences"] == 6
    monitor.reset()
    assert monitor.read() == {"a.b": {"sequences": 0}}


def test_a_handle_that_nobody_knows_records_nothing():
    q, k, v = tensors()
    recorder = Recorder()
    handle = recorder.handle("a.b", ["amax"])
    del recorder
    assert find(handle) is None and find("") is None and find("nobody/a") is None
    step(handle, q, k, v)


@pytest.mark.parametrize("matmul", ["", "qk=fp8_e4m3 pv=fp8_e4m3"])
def test_what_fp8_flushes_says_which_scale_an_outlier_needs(matmul):
    q, k, v = tensors(torch.bfloat16)
    q[:, 1, 4] *= 1e6  # one row, one column
    v[:, 2, :, 5] *= 1e6
    k[0, 0] = 0.0  # is zero, not flushed
    figures = recorded(lambda handle: step(handle, q, k, v, matmul=matmul))
    assert figures["flushed_k_by_head"] == figures["flushed_k_by_row"] == 0
    for name in ("q", "v"):
        assert figures[f"flushed_{name}_by_head"] > 0.2 and figures[f"flushed_{name}_by_row"] < 0.01


def test_a_row_of_nan_does_not_hide_what_other_rows_are():
    q, k, v = tensors()
    q[0, 0, 0] = math.nan
    figures = recorded(lambda handle: step(handle, q, k, v))
    assert 0 <= figures["row_sum_error"] < 1e-5 and figures["nonfinite_gradients"] > 0


def test_figures_of_scores_that_nobody_saw_are_left_out():
    """As GPU kernels record: sums of nothing are no figures."""

    def call(handle):
        find(handle).add({}, {"sequences": 2, "rows": 18}, 3, torch.device("cpu"), is_step=True)

    assert set(recorded(call)) & {"entropy", "repeated_maxima", "clipped_logits"} == set()


def test_figures_begun_in_inference_mode_go_on_in_training():
    q, k, v = tensors()
    recorder = Recorder()
    handle, monitor = recorder.handle("a.b", ["max_logit"]), Monitor(recorder)
    with torch.inference_mode():
        attention(q, k, v, record=handle, record_forward=True)
        monitor.load_state_dict(monitor.state_dict())
    step(handle, q, k, v)
    assert monitor.read()["a.b"]["sequences"] == 4


def test_the_state_of_another_version_is_refused():
    recorder = Recorder()
    recorder.handle("a.b", ["max_logit"])
    state = Monitor(recorder).state_dict()
    state["totals"]["a.b"] = state["totals"]["a.b"][1:]
    with pytest.raises(PrecisionPassError, match="PP501 figures of another version"):
        Monitor(recorder).load_state_dict(state)
