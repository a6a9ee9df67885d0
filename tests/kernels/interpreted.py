"""Run a check of the kernels on the CPU: Triton's interpreter is chosen as triton is imported, so in a process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def interpreted(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m tests.kernels.MODULE ARGUMENTS` under the interpreter: its exit status and what it printed."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
