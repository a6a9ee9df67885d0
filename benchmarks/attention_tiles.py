"""Time tile shapes of the attention kernels on this GPU, to fill the table in precisionpass/kernels/tuning.py.

    python benchmarks/attention_tiles.py [--out tiles.json]

Candidates of one problem run in rotation, hot, three rounds; medians in TFLOP/s. About two minutes on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[1]))
from precisionpass.kernels import attention, tuning
from precisionpass.kernels.launch import Plan, heads_last, options_of
from precisionpass.kernels.tuning import FORWARD, KEY_VALUE, QUERY, Tile
from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved

TOKENS, CHANNELS = 16384, 2048
FLOPS = {FORWARD: 4, KEY_VALUE: 8, QUERY: 6}
CANDIDATES = {
    FORWARD: {
        64: [(64, 128, 4, 2, 8), (64, 64, 4, 3, 8), (64, 64, 4, 3, 16), (128, 64, 8, 3, 8), (128, 128, 8, 2, 8),
             (64, 64, 4, 4, 8), (64, 64, 4, 3, 8, 0, True), (128, 64, 8, 3, 8, 0, True), (128, 64, 8, 3, 8, 128, True),
             (128, 128, 8, 2, 8, 0, True)],
        128: [(128, 128, 8, 3, 8, 0, True), (64, 64, 4, 3, 8, 0, True), (128, 64, 8, 3, 8, 0, True),
              (128, 64, 8, 4, 8, 0, True), (128, 128, 8, 2, 8, 0, True), (64, 128, 4, 2, 8, 0, True), (64, 64, 4, 3, 8),
              (64, 64, 4, 3, 8, 168)],
        256: [(128, 64, 8, 2, 8), (64, 64, 4, 2, 8), (128, 64, 8, 2, 16), (128, 32, 8, 3, 8)],
    },
    KEY_VALUE: {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3, 16, 168), (64, 64, 4, 2, 16, 128), (64, 128, 8, 3),
             (32, 64, 4, 4), (64, 64, 4, 4), (128, 128, 8, 2), (32, 64, 4, 3), (64, 128, 8, 2)],
        128: [(64, 64, 4, 2), (64, 64, 8, 2), (64, 128, 8, 2), (64, 128, 8, 3), (32, 64, 4, 3), (32, 128, 8, 3)],
        256: [(64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 2), (32, 64, 8, 3), (32, 128, 8, 2)],
    },
    QUERY: {
        64: [(128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 4), (128, 128, 8, 2),
             (128, 64, 4, 2), (64, 128, 4, 2)],
        128: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 128, 4, 2)],
        256: [(128, 64, 8, 1), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2)],
    },
}  # fmt: skip


def problem(width: int, length: int, causal: bool) -> tuple[AttentionArguments, torch.Tensor]:
    """16k tokens, 2048 channels."""
    heads = CHANNELS // width
    q, k, v, upstream = (
        torch.randn(TOKENS // length, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    arguments = AttentionArguments(
        q, k, v, scale=width**-0.5, causal="top_left" if causal else "none", save_residual=True
    )
    return arguments, upstream


def candidate(kernel: str, tile: Tile, arguments: AttentionArguments, state: tuple):
    """A function that runs one kernel with one tile."""
    rows, dq, dk, dv = state
    plan = Plan(arguments)
    plan.tile = lambda asked: tile

    def forward() -> None:
        attention.forward(arguments)

    def run() -> None:
        if kernel == KEY_VALUE:
            attention._launch_key_value(plan, rows, dk, dv)
        elif kernel == QUERY:
            attention._launch_query(plan, rows, dq)
        else:
            chosen, tuning.tile_for = tuning.tile_for, lambda *asked, **how: tile
            try:
                forward()
            finally:
                tuning.tile_for = chosen

    return run


def compile_ahead(runs: dict) -> None:
    """Compile all candidates on all processors; those that cannot be are reported when they run."""
    launch = attention.launch

    def warm(kernel, programs, tile, *arguments, **constants) -> None:
        kernel.warmup(*arguments, **constants, grid=(programs,), **options_of(tile))

    attention.launch = warm
    with ThreadPoolExecutor(14) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        for run in runs.values():
            run()
    attention.launch = launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--milliseconds", type=int, default=60)
    options = parser.parse_args()
    results = []
    problems = {}
    for width, length, causal in itertools.product(options.widths, options.lengths, (False, True)):
        arguments, upstream = problem(width, length, causal)
        output, residual, lse, _, _ = attention.forward(arguments)
        plan = Plan(arguments)
        gradients, saved = Gradients(upstream, None, None, (True,) * 5), Saved(output, residual, lse)
        rows = attention._Rows(plan, gradients, saved, upstream)
        attention._prepare(plan, rows)
        dq, dk, dv = (heads_last(t, t.shape, t.dtype) for t in (arguments.q, arguments.k, arguments.v))
        state = (rows, dq, dk, dv)
        for kernel, by_width in CANDIDATES.items():
            for shape in by_width[width]:
                name = (kernel, width, length, causal, Tile(*shape))
                problems[name] = candidate(kernel, Tile(*shape), arguments, state)
    compile_ahead(problems)
    for group in sorted({name[:4] for name in problems}):
        kernel, width, length, causal = group
        runs = {name[4]: run for name, run in problems.items() if name[:4] == group}
        times: dict[Tile, list[float]] = {}
        for tile, run in list(runs.items()):
            try:
                run()
                torch.cuda.synchronize()
                times[tile] = []
            except Exception as fault:  # noqa: BLE001  a tile that does not fit is an answer here
                print(f"{kernel} {width} {causal} {tuple(tile)}: {type(fault).__name__} {str(fault)[:80]}")
        for _ in range(3):
            for tile in times:
                times[tile].append(do_bench(runs[tile], warmup=10, rep=options.milliseconds, return_mode="median"))
        flops = FLOPS[kernel] * TOKENS * length * CHANNELS * (0.5 if causal else 1.0)
        ranked = sorted(times.items(), key=lambda item: statistics.median(item[1]))
        for tile, measured in ranked:
            rate = flops / statistics.median(measured) / 1e9
            results.append(
                {
                    "kernel": kernel,
                    "width": width,
                    "length": length,
                    "causal": causal,
                    "tile": tuple(tile),
                    "tflops": rate,
                }
            )
        listed = ", ".join(f"{tuple(t)} {flops / statistics.median(m) / 1e9:.0f}" for t, m in ranked)
        print(f"{kernel} {width} {length} {'causal' if causal else 'full'}: {listed}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
