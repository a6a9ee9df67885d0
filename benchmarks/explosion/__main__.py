"""Train the same small GPT under several attention arithmetics, and see whose weights run away.

    python benchmarks/explosion                                     # a GPU, the recipe "scratch", seeds 0 to 4
    python benchmarks/explosion --recipe frozen --seeds 0 1 2 3 4
    python benchmarks/explosion --device cpu --recipe scratch-small --seeds 0

Writes results.json, results.csv and runs.svg into --out, and goes on from what is there: the same command again
continues a run that was cut off. Arithmetics run side by side, a process each; every seed starts from the same weights
and sees the same data under all of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from arithmetics import ARITHMETICS, ON_CPU
from drawing import curves
from pretraining import checkpoint
from recipes import RECIPES, Recipe, text
from summary import rows, table
from training import Trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="scratch")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="other numbers, as eps=1e-8 pads=2")
    parser.add_argument("--arithmetics", nargs="+", choices=ARITHMETICS, help="float32 first; default all")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, default=Path("explosion"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out /= "-".join([options.recipe, *options.set])
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.arithmetics or (list(ARITHMETICS) if options.device == "cuda" else ON_CPU)
    if options.one:
        return train(options, names[0])
    if chosen(options).start and not (options.out / "start.pt").exists():
        run_alone(options, names[0], seeds=[]).wait()  # makes what all start from
    failed = [name for name in side_by_side(options, names) if not complete(options, name)]
    records = {name: load(options, name) for name in names if name not in failed}
    report(options, records)
    for name in failed:
        print(f"{name}: failed; its messages stand above", file=sys.stderr)
    return len(failed)


def side_by_side(options: argparse.Namespace, names: list[str]) -> list[str]:
    """Run every arithmetic in a process of its own, all at once on a GPU; the names, once all have ended."""
    open_ones = [name for name in names if not complete(options, name)]
    together = len(names) if options.device == "cuda" else 1
    for first in range(0, len(open_ones), together):
        for process in [run_alone(options, name, options.seeds) for name in open_ones[first : first + together]]:
            process.wait()
    return names


def run_alone(options: argparse.Namespace, name: str, seeds: list[int]) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).parent), "--one", "--arithmetics", name, "--recipe", options.recipe]
    command += ["--device", options.device, "--backend", options.backend, "--out", str(options.out.parent)]
    command += ["--set", *options.set] if options.set else []
    return subprocess.Popen([*command, "--seeds", *map(str, seeds)])


def chosen(options: argparse.Namespace) -> Recipe:
    """The recipe with what --set changes."""
    recipe = RECIPES[options.recipe]
    changes = dict(one.split("=", 1) for one in options.set)
    return replace(recipe, **{name: type(getattr(recipe, name))(value) for name, value in changes.items()})


def train(options: argparse.Namespace, name: str) -> int:
    """All seeds of one arithmetic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    recipe = chosen(options)
    start = None
    if recipe.start:
        start = checkpoint(recipe, text().to(options.device), options.out, options.backend)
    if not options.seeds:
        return 0
    trainer = Trainer(recipe, name, text(swapped=recipe.swapped).to(options.device), options.backend)
    for seed in options.seeds:
        record = trainer.run(seed, options.out, every=max(recipe.steps // 24, -(-128 // recipe.sequences)), start=start)
        path(options, name, seed).write_text(json.dumps(record) + "\n")
        print(
            f"{name:<17} seed {seed}  step {record['step'][-1]}  loss {record['loss'][-1]:.3f}  "
            f"|W_Q| {max(record['query_norm'][-1]):.2f}  max logit {max(map(max, record['max_logit'][-1])):.0f}",
            flush=True,
        )
    return 0


def path(options: argparse.Namespace, name: str, seed: int) -> Path:
    return options.out / f"{name}-{seed}.json"


def complete(options: argparse.Namespace, name: str) -> bool:
    return all(path(options, name, seed).exists() for seed in options.seeds)


def load(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    return [json.loads(path(options, name, seed).read_text()) for seed in options.seeds]


def report(options: argparse.Namespace, records: dict[str, list[dict[str, Any]]]) -> None:
    found = rows(records)
    print(table(found))
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    about = {"recipe": options.out.name, "device": device, "torch": torch.__version__}
    (options.out / "results.json").write_text(json.dumps(about | {"runs": records, "rows": found}) + "\n")
    with (options.out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    (options.out / "runs.svg").write_text(curves(records), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
