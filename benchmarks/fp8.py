"""What FP8 products in attention cost in exactness, on any machine, and what they gain, on a GPU that has them.

    python benchmarks/fp8.py [--lengths 4096 8192 16384] [--milliseconds 250]

Errors of the output against float64, relative to those of BF16 (or of rounding to BF16, where the output is nearly a
BF16 number), on the inputs of numerics/generators.py. Times of the forward with both products in e4m3, casts and all,
beside the forward of BF16 with the residual of training and without; the candidates take turns.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import precisionpass.ops  # noqa: F401
from precisionpass.numerics import generators
from precisionpass.numerics.bias import exact
from precisionpass.numerics.fp8 import DTYPES, has_fp8
from precisionpass.ops.arguments import AttentionArguments

BF16_ROUNDING = 1.6e-3
TOKENS, CHANNELS, WIDTH = 16384, 2048, 128


def errors() -> None:
    """A line for each set of inputs: BF16's error, then the factor of each product in each format."""
    columns = [f"{part}={dtype}" for dtype in DTYPES for part in ("qk", "pv")]
    columns += [f"qk={dtype} pv={dtype}" for dtype in DTYPES]
    print(f"{'error of O':<16}{'BF16':>9}  " + "  ".join(columns))
    for name, make in (generators.SHARP | generators.WIDE | generators.CONTROLS).items():
        case = make(0)
        truth = exact(case).output

        def error(matmul: str, case=case, truth=truth) -> float:
            settings = {"scale": generators.SCALE, "causal": case.causal, "mask": case.mask, "matmul": matmul}
            output = torch.ops.precisionpass.attention(case.q, case.k, case.v, **settings)[0]
            return float((output.double() - truth).norm() / truth.norm())

        base = error("")
        cells = [f"{error(text) / max(base, BF16_ROUNDING):.1f}x".rjust(len(text)) for text in columns]
        print(f"{name:<16}{base:9.1e}  " + "  ".join(cells), flush=True)


def speeds(lengths: list[int], milliseconds: int) -> None:
    """TFLOP/s of the forward, full and causal, and how many times the one of BF16 in training."""
    from turns import in_rotation, machine

    from precisionpass.kernels import attention

    machine()
    kinds = {
        "FP8": {"matmul": "qk=fp8_e4m3 pv=fp8_e4m3"},
        "FP8 Q K^T": {"matmul": "qk=fp8_e4m3"},
        "BF16": {"save_residual": True},
        "BF16, inference": {},
    }
    for length in lengths:
        for causal in ("none", "top_left"):
            shape = (TOKENS // length, length, CHANNELS // WIDTH, WIDTH)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
            common = {"scale": WIDTH**-0.5, "causal": causal}
            made = {name: AttentionArguments(q, k, v, **common, **more) for name, more in kinds.items()}
            runs = {name: partial(attention.forward, arguments) for name, arguments in made.items()}
            times = in_rotation(runs, milliseconds)
            flops = 4 * TOKENS * length * CHANNELS * (1.0 if causal == "none" else 0.5)
            cells = (f"{name} {flops / t / 1e9:4.0f} ({times['BF16'] / t:.2f}x)" for name, t in times.items())
            print(f"hd{WIDTH} S{length:<6} {causal:<9}" + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--milliseconds", type=int, default=250)
    options = parser.parse_args()
    errors()
    if has_fp8("cuda"):
        speeds(options.lengths, options.milliseconds)


if __name__ == "__main__":
    main()
