"""LayerNorm, RMSNorm and softmax over rows, forward and backward, as a share of this GPU's copy bandwidth.

    python benchmarks/rows.py [--columns 768 1024 2048 4096 8192 16384 32768 65536] [--milliseconds 60] [--out FOLDER]

BF16, 2^28 elements. Ours beside eager PyTorch, torch.compile of the same, and Liger where it is installed; the
candidates of a problem take turns, three rounds, medians. A forward moves 2 tensors, a backward 3. Compare inside one
run only. Writes rows.json, and rows.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from turns import draw, in_rotation, machine

sys.path.insert(0, str(Path(__file__).parents[1]))
import precisionpass.ops  # noqa: F401  registers torch.ops.precisionpass

ELEMENTS = 1 << 28
COLUMNS = (768, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
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
        from liger_kernel.transformers.functional import liger_layer_norm, liger_rms_norm, liger_softmax
    except ImportError:
        return found
    found["layer_norm"]["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, 1e-5)
    found["rms_norm"]["liger"] = lambda x, w, b: liger_rms_norm(x, w, 1e-6)
    found["softmax"]["liger"] = lambda x, w, b: liger_softmax(x)
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
                run = ready(function, direction, x, gradient, (weight, bias), operation)
                if run is not None:
                    runs[name] = run
            times = in_rotation(runs, milliseconds, warmup=20)
            copy = times.pop("copy")
            shares = {name: moved / 2 * copy / found for name, found in times.items()}
            bandwidth = 2 * x.numel() * x.element_size() / copy / 1e6
            problem = {"operation": operation, "columns": columns, "direction": direction, "copy": bandwidth}
            rows.append(problem | shares)
            listed = "  ".join(f"{name} {share:.2f}" for name, share in shares.items())
            print(f"{operation:<11} N {columns:<6} {direction:<9} copy {bandwidth:.0f} GB/s  {listed}", flush=True)
    return rows


def ready(
    function: Function, direction: str, x: Tensor, gradient: Tensor, parameters: tuple[Tensor, Tensor], operation: str
) -> Callable[[], object] | None:
    """One call of a candidate, to be timed; None, and said so, where it fails."""
    weight, bias = parameters
    try:
        if direction == "forward":
            function(x, weight.detach(), bias.detach())
            return lambda: function(x, weight.detach(), bias.detach())
        leaf, slope = x.detach().requires_grad_(), gradient.clone()  # Liger's RMSNorm writes over it
        y = function(leaf, weight, bias)
        leaves = {"softmax": [leaf], "rms_norm": [leaf, weight], "layer_norm": [leaf, weight, bias]}[operation]
        torch.autograd.grad(y, leaves, slope, retain_graph=True)
        return lambda: torch.autograd.grad(y, leaves, slope, retain_graph=True)
    except (RuntimeError, TypeError, AssertionError, triton.CompilationError) as problem:
        print(f"{operation} {direction}: {type(problem).__name__}: {str(problem).splitlines()[0][:150]}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    parser.add_argument("--milliseconds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    report = machine()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for columns in options.columns:
        rows += measure(columns, options.milliseconds)
        (options.out / "rows.json").write_text(json.dumps(report | {"rows": rows}, indent=1))
    names = ("ours", "eager", "inductor", "liger")
    label = "{operation}\n{columns}".format_map
    draw(rows, names, label, "share of copy bandwidth", options.out / "rows.png")


if __name__ == "__main__":
    main()
