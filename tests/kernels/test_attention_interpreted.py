"""The logic of the attention kernels on the CPU: Triton's interpreter, in processes of its own, against float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.cases import CASES

ROOT = Path(__file__).parents[2]
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_agrees_with_float64(part):
    names = list(CASES)[part::PARTS]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.check_interpreted", *names]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("right") >= len(names)
