"""What the GPU benchmarks share: candidates that take turns, the machine they ran on, and bars of the figures."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

Run = Callable[[], object]


def in_rotation(runs: dict[str, Run], milliseconds: int, warmup: int = 25, rounds: int = 3) -> dict[str, float]:
    """Median milliseconds of each, taking turns, without pauses; `warmup` milliseconds before each turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(do_bench(run, warmup=warmup, rep=milliseconds, return_mode="median"))
    return {name: statistics.median(found) for name, found in times.items()}


def machine() -> dict[str, str]:
    """Device, versions and date of a report, printed too."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    found = {"device": torch.cuda.get_device_name(), "versions": versions, "date": time.strftime("%Y-%m-%d")}
    print(", ".join(found.values()), flush=True)
    return found


def draw(rows: list[dict], names: Sequence[str], label: Callable[[dict], str], unit: str, file: Path) -> None:
    """Bars of `names` by problem, forward above backward; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(14, 8), layout="constrained")
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        for offset, name in enumerate(names):
            places = [index + 0.2 * offset for index in range(len(chosen))]
            axis.bar(places, [row.get(name, 0) for row in chosen], 0.2, label=name)
        axis.set_xticks([index + 0.3 for index in range(len(chosen))], [label(row) for row in chosen], fontsize=7)
        axis.set_ylabel(f"{direction}, {unit}")
        axis.legend(ncols=4)
    figure.savefig(file, dpi=110)
