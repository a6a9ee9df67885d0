"""LayerNorm, RMSNorm and softmax over rows, forward and backward, as a share of this GPU's copy bandwidth.

    python benchmarks/rows.py [--columns 768 1024 4096 16384 65536] [--milliseconds 60] [--out FOLDER]

BF16, 2^28 elements. Ours beside eager PyTorch, torch.compile of the same, and Liger where it is installed; the
candidates of a problem take turns, three rounds, medians. A forward moves 2 tensors, a backward 3. Compare inside one
run only. Writes rows.json, and rows.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[1]))
import precisionpass.ops  # noqa: F401  registers torch.ops.precisionpass

ELEMENTS = 1 << 28
OPS = torch.ops.precisionpass
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def functions() -> dict[str, dict[str, Function]]:
    """By operation and candidate: (x, weight, bias) -> y."""
    found: dict[str, dict[str, Function]] = {
        "layer_norm": {
            "ours": lambda x, w, b: OPS.layer_norm(x, 1, w, b, 1e-5)[0],
            "eager": lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        },
        "rms_norm": {
            "ours": lambda x, w, b: OPS.rms_norm(x, 1, w, None, 1e-6)[0],
            "eager": lambda x, w, b: F.rms_norm(x, w.shape, w, 1e-6),
        },
        "softmax": {
            "ours": lambda x, w, b: OPS.softmax(x, -1),
            "eager": lambda x, w, b: F.softmax(x, -1),
        },
    }
    for candidates in found.values():
        candidates["inductor"] = torch.compile(candidates["eager"], dynamic=False)
    try:
        from liger_kernel.transformers.functional import liger_layer_norm, liger_rms_norm
    except ImportError:
        return found
    found["layer_norm"]["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, 1e-5)
    found["rms_norm"]["liger"] = lambda x, w, b: liger_rms_norm(x, w, 1e-6)
    return found


def measure(columns: int, milliseconds: int) -> list[dict]:
    """One row for each operation and direction: shares of the copy bandwidth, printed as they are measured."""
    x = torch.randn(ELEMENTS // columns, columns, device="cuda", dtype=torch.bfloat16)
    gradient, target = torch.randn_like(x), torch.empty_like(x)
    weight, bias = (torch.randn(columns, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    rows = []
    for operation, candidates in functions().items():
        for direction, moved in (("forward", 2), ("backward", 3)):
            runs: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(x)}
            for name, function in candidates.items():
                if direction == "forward":
                    runs[name] = lambda function=function: function(x, weight.detach(), bias.detach())
                    continue
                leaf = x.detach().requires_grad_()
                y = function(leaf, weight, bias)
                leaves = [leaf] if operation == "softmax" else [leaf, weight]
                leaves += [bias] if operation == "layer_norm" else []
                runs[name] = lambda y=y, leaves=leaves: torch.autograd.grad(y, leaves, gradient, retain_graph=True)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(3):
                for name, run in runs.items():
                    times[name].append(do_bench(run, warmup=20, rep=milliseconds, return_mode="median"))
            copy = statistics.median(times.pop("copy"))
            shares = {name: moved / 2 * copy / statistics.median(found) for name, found in times.items()}
            bandwidth = 2 * x.numel() * x.element_size() / copy / 1e6
            problem = {"operation": operation, "columns": columns, "direction": direction, "copy": bandwidth}
            rows.append(problem | shares)
            listed = "  ".join(f"{name} {share:.2f}" for name, share in shares.items())
            print(f"{operation:<11} N {columns:<6} {direction:<9} copy {bandwidth:.0f} GB/s  {listed}", flush=True)
    return rows


def draw(rows: list[dict], file: Path) -> None:
    """Bars of shares by problem, forward above backward; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(14, 8), layout="constrained")
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        for offset, name in enumerate(("ours", "eager", "inductor", "liger")):
            places = [index + 0.2 * offset for index in range(len(chosen))]
            axis.bar(places, [row.get(name, 0) for row in chosen], 0.2, label=name)
        labels = [f"{row['operation']}\n{row['columns']}" for row in chosen]
        axis.set_xticks([index + 0.3 for index in range(len(chosen))], labels, fontsize=7)
        axis.set_ylabel(f"{direction}, share of copy bandwidth")
        axis.legend(ncols=4)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[768, 1024, 4096, 16384, 65536])
    parser.add_argument("--milliseconds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    device = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    print(f"{device}, {versions}, {time.strftime('%Y-%m-%d')}", flush=True)
    rows = [row for columns in options.columns for row in measure(columns, options.milliseconds)]
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"device": device, "versions": versions, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    (options.out / "rows.json").write_text(json.dumps(report, indent=1))
    draw(rows, options.out / "rows.png")


if __name__ == "__main__":
    main()
