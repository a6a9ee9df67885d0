"""Time what recording costs an attention on this GPU: forward and backward, nothing, one figure, everything, clipping.

    python benchmarks/recording.py [--out recording.json]

Candidates take turns, hot; medians in milliseconds, and the share above that of nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import precisionpass.ops  # noqa: F401
from benchmarks.turns import in_rotation, machine
from precisionpass.hooks.recorder import Recorder

SHAPES = {"16 x 12 x 1024 x 64": (16, 12, 1024, 64), "4 x 16 x 4096 x 128": (4, 16, 4096, 128)}
RECORDS = {
    "nothing": (),
    "delta_bias": ("delta_bias",),
    "max_logit": ("max_logit",),
    "amax, nonfinite": ("amax", "nonfinite"),
    "everything": ("delta_bias", "max_logit", "amax", "nonfinite"),
}
CLIPS = {
    "logit_clip": {"logit_clip": "hard", "logit_clip_max": 50.0},
    "output_clip": {"output_clip": 100.0},
    "grad_clip": {"grad_clip_kind": "value", "grad_clip": 1.0},
}


def step(tensors: list[torch.Tensor], upstream: torch.Tensor, **settings: object) -> None:
    """Forward and backward of a causal attention in BF16."""
    attention = torch.ops.precisionpass.attention
    output = attention(*tensors, causal="top_left", scale=0.1, save_residual=True, **settings)[0]
    torch.autograd.grad(output, tensors, upstream)


def candidates(shape: tuple[int, int, int, int], recorder: Recorder) -> dict[str, partial]:
    """A step for each candidate, all on the same tensors."""
    batch, heads, length, width = shape
    q, k, v, upstream = (
        torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    tensors = [part.requires_grad_() for part in (q, k, v)]
    settings = {name: {"record": recorder.handle(name, records)} for name, records in RECORDS.items()}
    return {name: partial(step, tensors, upstream, **chosen) for name, chosen in (settings | CLIPS).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("recording.json"))
    parser.add_argument("--milliseconds", type=int, default=60)
    options = parser.parse_args()
    report: dict[str, object] = machine()
    recorder = Recorder()
    runs = {shape: candidates(sizes, recorder) for shape, sizes in SHAPES.items()}
    with ThreadPoolExecutor(8) as pool:  # compile side by side
        list(pool.map(lambda run: run(), (run for shape in runs.values() for run in shape.values())))
    for shape, steps in runs.items():
        times = in_rotation(steps, options.milliseconds)
        report[shape] = times
        for name, found in times.items():
            print(f"{shape}: {name:16s} {found:.3f} ms  {found / times['nothing'] - 1:+.1%}", flush=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
