"""The attention kernels under compute-sanitizer: no access out of bounds, no race, on a small matrix of variants.

    python tests/gpu/sanitize.py [--tools memcheck racecheck] [--seconds 300]

Needs compute-sanitizer (it comes with the CUDA toolkit) on the PATH. Exit status 1 where it finds something, 2 where it
cannot run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

NAMES = (
    "causal, tiles and a tail", "bottom_right, more keys", "grouped", "window, two sides", "odd widths",
    "latent, 192 and 128", "bias, causal", "mask of documents", "mask of documents, tails, causal", "softcap",
    "sinks by head", "dropout, grouped, bias", "recompute", "decode, many keys", "one key",
)  # fmt: skip
HOPPER_NAMES = ("causal, any length", "any lengths, 64 wide", "bottom_right, more keys", "grouped", "window, two sides")


def attend() -> int:
    """Every case forward and backward, against float64; the number of wrong ones."""
    import torch

    from tests.gpu.test_hopper import CASES as HOPPER_CASES
    from tests.gpu.test_hopper import HOPPER
    from tests.kernels.agreement import disagreements
    from tests.kernels.cases import CASES

    chosen = {name: CASES[name] for name in NAMES}
    chosen |= {f"Hopper, {name}": HOPPER_CASES[name] for name in HOPPER_NAMES if HOPPER}
    wrong = 0
    for name, case in chosen.items():
        errors = disagreements(case, torch.bfloat16, "cuda")
        torch.cuda.synchronize()
        wrong += not all(value < 3 for value in errors.values())
        print(f"{name}: {max(errors.values()):.2f} roundings", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=float, default=300.0, help="the longest a tool may take")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return attend()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an access past a tensor is past an allocation
    status = attend()  # compiles everything once, outside
    for tool in options.tools:
        begin = time.time()
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-name-exclude", "kns=at::"]
        command += [sys.executable, __file__, "--inside"]
        try:
            ran = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=options.seconds, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            print(f"{tool}: not finished after {options.seconds:.0f} s")
            status = status or 2
            continue
        print("\n".join(ran.stdout.splitlines()[-25:]), ran.stderr[-2000:], sep="\n")
        print(f"{tool}: exit status {ran.returncode}, {time.time() - begin:.0f} s", flush=True)
        status = status or int(ran.returncode != 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
