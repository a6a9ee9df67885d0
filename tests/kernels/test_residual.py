"""The kernels' int8 residual on the CPU, by Triton's interpreter in a process of its own; tests/gpu runs the same."""


import pytest

pytest.importorskip("triton")

from tests.kernels.interpreted import interpreted


def test_the_residual_of_the_kernels_is_that_of_the_specification():
    result = interpreted("check_residual")
    assert result.returncode == 0, result.stderr[-2000:]
