"""Norm and softmax kernels without a GPU: their logic by the interpreter, and binaries for GPUs that are not there."""


import pytest
import torch

pytest.importorskip("triton")

from precisionpass.kernels import rows
from tests.kernels.check_rows import CASES, SOFTMAXES
from tests.kernels.compiling import SHARED_MEMORY_LIMIT, TARGETS, compiling_for
from tests.kernels.interpreted import interpreted

SPILLED = 64  # bytes a thread that may leave the registers, so that another program fits beside


def test_every_case_agrees_with_float64():
    result = interpreted("check_rows")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("right") >= 2 * len(CASES) + 4 * len(SOFTMAXES)


@pytest.mark.parametrize(("columns", "weights", "launches"), [
    (768, torch.float32, 5), (16384, torch.bfloat16, 5), (16384, torch.float32, 6), (50000, torch.float32, 6),
])  # fmt: skip
@pytest.mark.parametrize("target", TARGETS)
def test_they_compile_within_the_limits(target, columns, weights, launches):
    x, weight = torch.zeros(40, columns, dtype=torch.bfloat16), torch.zeros(columns, dtype=weights)
    needs = (True, True, True)
    with compiling_for(target) as binaries:
        _, mean, rstd = rows.norm_forward(x, 1, weight, weight, 1e-5, 0.0, None, center=True)
        rows.norm_backward(x, x, 1, weight, weight, mean, rstd, 0.0, needs)
        rows.softmax_backward(x, rows.softmax_forward(x, 1, None, log=False), 1, log=False)
        rows.softmax_forward(x, 0, None, log=True)
    assert len(binaries) == launches
    for binary in binaries:
        assert binary.shared_memory <= SHARED_MEMORY_LIMIT[target], binary
        assert (binary.stack or 0) <= SPILLED, binary


@pytest.mark.parametrize("columns", [8192, 16384])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_gradient_in_float32_and_a_further_one_fit_too(target, columns):
    x, mean = torch.zeros(40, columns, dtype=torch.bfloat16), torch.zeros(40, 1)
    with compiling_for(target) as binaries:
        for gradient, weight in ((x.float(), x[0]), (x, x[0]), (x, x[0].float())):
            rows.norm_backward(gradient, x, 1, weight, weight, mean, mean, 0.0, (True, True, True), x)
    for binary in binaries:
        assert binary.shared_memory <= SHARED_MEMORY_LIMIT[target], binary


@pytest.mark.parametrize("columns", [768, 50000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_that_nobody_asked_for_are_empty_tensors_of_their_own(columns, dtype):
    """The results of a custom op must not share memory, or be one tensor twice."""
    x = torch.zeros(4, columns, dtype=dtype)
    with compiling_for("sm_90"):
        _, mean, rstd = rows.norm_forward(x, 1, None, None, 1e-5, 0.0, None, center=True)
        results = rows.norm_backward(x, x, 1, None, None, mean, rstd, 0.0, (True, False, False))
    assert len({id(part) for part in results}) == 3
    assert [part.numel() for part in results[1:]] == [0, 0]
    assert [part.dtype for part in results] == [dtype] * 3
