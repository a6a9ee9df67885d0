"""Random shapes and masks over a bounded number of binaries, against float64, forward and backward.

    python tests/gpu/fuzz_attention.py [--count 2000] [--seed 0] [--seconds 600] [--processes 8] [--hopper]

Kinds (bounds, mask, bias, groups, dropout ...) come from a short list, so that few kernels are compiled; lengths, head
counts and inputs are random. Compiling takes most of the time, so processes share it. Prints every fault with the
number that draws it again. --hopper: by the Hopper kernels, dQ in one pass with dK and dV every other time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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
    {"score": "where(i - j < 30, s, -inf) * (1 + 0.1 * h) - abs(i - j) / 50", "causal": "top_left"},
    {"packed": True, "causal": "top_left"},
    {"packed": True, "causal": "bottom_right", "window_left": 40},
]

HOPPER_KINDS = KINDS[:5]


def draw(source: random.Random, hopper: bool) -> Case:
    """One attention: a kind, and sizes of every sort."""
    settings = dict(source.choice(HOPPER_KINDS if hopper else KINDS))
    shape = {
        "batch": source.randint(1, 3),
        "width": source.choice([64, 64, 128]),
        "rows": source.choice([1, 2, 17, 63, 64, 65, 127, 128, 129, source.randint(1, 700)]),
        "size": source.choice([0.1, 1.0, 1.0, 4.0]),
    }
    if hopper:
        settings |= {"implementation": "hopper", "deterministic": source.random() < 0.5}
        shape["rows"] = source.choice([65, 127, 128, 129, 192, source.randint(65, 900)])
    shape["keys"] = source.choice([shape["rows"], shape["rows"], source.randint(1, 700)])
    shape["key_heads"] = source.randint(1, 3)
    shape["heads"] = shape["key_heads"] * source.choice([1, 1, 2, 4])
    tensors = {}
    if settings.pop("packed", False):
        shape["batch"], count = 1, source.randint(1, 40)
        for name, total in (("cu_seqlens_q", shape["rows"]), ("cu_seqlens_k", shape["keys"])):
            bounds = [0, *sorted(source.randint(0, total) for _ in range(count))]
            tensors[name] = lambda r, b=bounds: torch.tensor(b, dtype=torch.int32)
    for name in ("mask", "bias"):
        if name in settings:
            rows = 1 if settings.pop(name) == "key" else shape["rows"]
            sizes = (shape["batch"], 1, rows, shape["keys"])
            tensors[name] = (lambda r, s=sizes: r(*s) > -0.5) if name == "mask" else (lambda r, s=sizes: 3 * r(*s))
    return Case(**shape, tensors=tensors, settings=settings)


def check(number: int, deadline: float, hopper: bool) -> tuple[float, str]:
    """The largest error of one drawn attention in roundings, and what was wrong; (-1, "") once time is up."""
    if time.time() > deadline:
        return -1.0, ""
    case = draw(random.Random(number), hopper)
    errors = disagreements(case, torch.bfloat16, "cuda")
    wrong = not all(value < 3 for value in errors.values())
    return max(errors.values()), f"FAULT number {number}: {case} {errors}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--hopper", action="store_true", help="the Hopper kernels alone")
    options = parser.parse_args()
    numbers = [options.seed * 1_000_003 + index for index in range(options.count)]
    begin = time.time()
    deadlines, hopper = [begin + options.seconds] * len(numbers), [options.hopper] * len(numbers)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        results = [result for result in pool.map(check, numbers, deadlines, hopper) if result[0] >= 0]
    for _, fault in results:
        if fault:
            print(fault)
    faults, worst = sum(bool(fault) for _, fault in results), max(error for error, _ in results)
    spent = time.time() - begin
    print(f"{len(results)} attentions, {faults} faults, largest error {worst:.2f} roundings, {spent:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
