"""What the kernels record: in Triton's interpreter against the reference, and compiled for GPUs that are not there."""


import pytest
import torch

pytest.importorskip("triton")

from precisionpass.hooks.collector import Collector
from precisionpass.hooks.recorder import Recorder
from precisionpass.kernels import attention
from precisionpass.ops.arguments import Gradients, Saved
from tests.kernels.compiling import compiling_for, example
from tests.kernels.interpreted import interpreted


def test_the_kernels_record_what_the_reference_does():
    result = interpreted("check_figures")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("right") >= 12


def query_kernel(target, records, monkeypatch, **settings):
    """The kernel of dQ, compiled for a site that records this."""
    monkeypatch.setattr(attention, "record", lambda collector, rows: None)  # only compiled: nothing is there to fold
    arguments, recorder = example(causal="top_left", **settings), Recorder()
    recorder.handle("site", records)
    collector = Collector(recorder.site("site"), arguments) if records else None
    with compiling_for(target, keep_text=True) as found:
        output, residual, lse, *_ = attention.forward(arguments)
        gradients = Gradients(torch.empty_like(output), None, None, (True, True, True, False, False))
        attention.backward(gradients, arguments, Saved(output, residual, lse), collector)
    (kernel,) = (binary for binary in found if binary.kernel == "query_gradients")
    return kernel


@pytest.mark.parametrize(("target", "width"), [("sm_80", 64), ("sm_90", 64), ("sm_90", 128), ("gfx942", 64)])
def test_recording_spills_nothing_that_was_in_registers(target, width, monkeypatch):
    without = query_kernel(target, (), monkeypatch, width=width)
    with_it = query_kernel(target, ("delta_bias",), monkeypatch, width=width)
    assert with_it.shared_memory == without.shared_memory
    assert (with_it.stack or 0) <= (without.stack or 0)


def test_what_needs_no_row_sums_runs_the_very_same_kernel(monkeypatch):
    without, other = (query_kernel("sm_90", records, monkeypatch) for records in ((), ("amax", "max_logit")))
    assert other == without
    assert query_kernel("sm_90", ("delta_bias",), monkeypatch).text != without.text
