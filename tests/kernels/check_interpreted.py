"""Run under TRITON_INTERPRET=1: the kernels' logic on the CPU, in FP16 and FP32 (the interpreter is wrong for BF16)."""

import sys

import torch

from precisionpass.kernels import tuning
from tests.kernels.agreement import disagreements
from tests.kernels.cases import CASES

FP32 = (
    "causal", "grouped", "odd widths", "bias, causal", "window, two sides", "dropout", "recompute", "packed",
    "score, packed",
)  # fmt: skip


def main(names: list[str]) -> int:
    """Print the errors of each case in units of rounding; the number of cases with one above 3."""
    torch.set_num_threads(1)
    tuning.multiprocessors = lambda device: 16  # as on a small GPU: few rows are split over keys
    faults = 0
    for name, case in CASES.items():
        if names and name not in names:
            continue
        for dtype in (torch.float16, torch.float32) if name in FP32 else (torch.float16,):
            errors = disagreements(case, dtype)
            wrong = any(not value < 3 for value in errors.values())
            faults += wrong
            listed = " ".join(f"{key} {value:.2f}" for key, value in errors.items())
            print("FAULT" if wrong else "right", name, str(dtype).removeprefix("torch."), listed, flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
