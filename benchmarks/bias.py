"""The bias and error of attention arithmetics on inputs that make training fail, against float64: the table of README.

    python benchmarks/bias.py [--seeds 0 1 2] [--out FILE.json]

Worst of the seeds, on the CPU reference, which is the specification. rho: rms of rowsum dS, relative; b: size of its
mean; output: largest error of O in units of 2^-8 of P|V|; drift: how far W_Q runs from float64's in 160 steps of SGD on
the twin sink. The inputs and limits are those of precisionpass/numerics, which the tests use.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import precisionpass.ops  # noqa: F401  registers torch.ops.precisionpass
from precisionpass.numerics import arithmetics, generators
from precisionpass.numerics.bias import Measured, drift, exact, measure, through_op

ATTENTION = torch.ops.precisionpass.attention
ARITHMETICS = {
    "precisionpass": through_op(ATTENTION),
    "flash-style": through_op(ATTENTION, normaliser="float32", delta="output"),
    "with a fast exp": arithmetics.fast_exponential,
    "all in BF16": arithmetics.all_sixteen_bit,
}
INPUTS = {"sharp (G1-G5)": generators.SHARP, "large (G6-G8)": generators.WIDE}


def main() -> None:
    parser = argparse.ArgumentParser(description="Bias and error of attention arithmetics.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    options = parser.parse_args()
    heads = "".join(f"{f'{name}: rho':>20}{'b':>10}{'output':>8}" for name in INPUTS)
    print(f"{'arithmetic':<18}{heads}{'drift':>10}")
    rows = {}
    for name, attend in ARITHMETICS.items():
        row = rows[name] = {inputs: worst(attend, cases, options.seeds) for inputs, cases in INPUTS.items()}
        row["drift"] = drift(attend)
        cells = "".join(f"{row[i]['rho']:>20.1e}{row[i]['bias']:>10.1e}{row[i]['output']:>8.2f}" for i in INPUTS)
        print(f"{name:<18}{cells}{row['drift']:>10.1e}", flush=True)
    if options.out:
        content = {"torch": torch.__version__, "seeds": options.seeds, "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def measured(attend, cases, seeds) -> list[Measured]:
    """The figures of every case and seed."""
    found = []
    for make in cases.values():
        for seed in seeds:
            case = make(seed)
            if case.mask is not None and attend in (arithmetics.fast_exponential, arithmetics.all_sixteen_bit):
                continue  # these two know no mask
            found.append(measure(case, attend(case), exact(case)))
    return found


def worst(attend, cases, seeds) -> dict[str, float]:
    """The largest rho, bias and output error over cases and seeds."""
    found = measured(attend, cases, seeds)
    return {figure: max(getattr(one, figure) for one in found) for figure in ("rho", "bias", "output")}


if __name__ == "__main__":
    main()
