"""The logic of the attention kernels on the CPU: Triton's interpreter, in processes of its own, against float64."""


import pytest

pytest.importorskip("triton")

from tests.kernels.cases import CASES
from tests.kernels.interpreted import interpreted

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_agrees_with_float64(part):
    names = list(CASES)[part::PARTS]
    result = interpreted("check_interpreted", *names)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("right") >= len(names)
