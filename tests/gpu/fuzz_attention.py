"""Random shapes and masks over a bounded number of binaries, against float64, forward and backward.

    python tests/gpu/fuzz_attention.py [--count 2000] [--seed 0] [--seconds 600]

Kinds (bounds, mask, bias, groups, dropout ...) come from a short list, so that few kernels are compiled; lengths, head
counts and inputs, outlier channels among them, are random. Prints every fault with what makes it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels.agreement import disagreements
from tests.kernels.cases import Case

KINDS: list[dict] = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right"},
    {"causal": "top_left", "window_left": 40},
    {"window_left": 30, "window_right": 20},
    {"mask": "key"},
    {"mask": "full", "causal": "top_left"},
    {"bias": "full"},
    {"bias": "key", "causal": "top_left"},
    {"softcap": 3.0, "causal": "top_left"},
    {"dropout_p": 0.2},
]


def draw(source: random.Random) -> Case:
    """One attention: a kind, and sizes of every sort."""
    settings = dict(source.choice(KINDS))
    shape = {
        "batch": source.randint(1, 3),
        "width": source.choice([64, 64, 128, 80]),
        "rows": source.choice([1, 2, 17, 63, 64, 65, 127, 128, 129, source.randint(1, 700)]),
        "size": source.choice([0.1, 1.0, 1.0, 4.0]),
    }
    shape["keys"] = source.choice([shape["rows"], shape["rows"], source.randint(1, 700)])
    shape["key_heads"] = source.randint(1, 3)
    shape["heads"] = shape["key_heads"] * source.choice([1, 1, 2, 4])
    tensors = {}
    for name in ("mask", "bias"):
        if name in settings:
            rows = 1 if settings.pop(name) == "key" else shape["rows"]
            sizes = (shape["batch"], 1, rows, shape["keys"])
            tensors[name] = (lambda r, s=sizes: r(*s) > -0.5) if name == "mask" else (lambda r, s=sizes: 3 * r(*s))
    return Case(**shape, tensors=tensors, settings=settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    begin, faults, done, worst = time.time(), 0, 0, 0.0
    for index in range(options.count):
        if time.time() - begin > options.seconds:
            break
        number = options.seed * 1_000_003 + index
        case = draw(random.Random(number))
        errors = disagreements(replace(case), torch.bfloat16, "cuda")
        done += 1
        worst = max(worst, *errors.values())
        if not all(value < 3 for value in errors.values()):
            faults += 1
            print(f"FAULT number {number}: {case} {errors}", flush=True)
    print(f"{done} attentions, {faults} faults, largest error {worst:.2f} roundings, {time.time() - begin:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
