"""Does the loss bear FP8 attention? A GPT-2, of 10 M parameters unless told otherwise, trained with it and without.

    python benchmarks/fp8_training.py [--steps 2000] [--out FOLDER]      # one run an arm, on a GPU with FP8
    python benchmarks/fp8_training.py --draw FOLDER/fp8_training.json    # docs/fp8_training.svg of what was measured

BF16 by autocast over FP32 weights, AdamW, batches of 32 x 128 bytes of the Python standard library, the same in every
arm. BF16 runs twice, with two seeds of the weights: what they differ by is the noise that FP8 has to be seen against.
Other sizes: --layers, --width, --sequences. --device cpu emulates FP8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from plots import COLOURS, WIDTH, document, scale, text, title  # noqa: E402
from small_models import batches, corpus, gpt2, speed_up_bf16  # noqa: E402

import precisionpass  # noqa: E402
from precisionpass import Match, Rule  # noqa: E402

PARTS = 20  # of a run, whose losses are averaged
FP8 = {"qk": "fp8_e4m3", "pv": "fp8_e4m3"}
ARMS = {"BF16": ({}, 0), "FP8 forward": ({"matmul": FP8}, 0), "BF16, another seed": ({}, 1)}


def losses(settings: dict, seed: int, options: argparse.Namespace) -> list[float]:
    """The mean loss of each of the PARTS of the run, nats a byte."""
    steps, device = options.steps, options.device
    model = gpt2(seed, options.layers, options.width, attn_implementation="sdpa").to(device)
    where = {"implementation": "triton" if device == "cuda" else "reference"}
    rule = Rule(id="attention", match=Match(op="attention", where="dtype == bf16"), apply=where | settings)
    precisionpass.compile(model, rules=[rule], backend="inductor" if device == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=device == "cuda")
    found = torch.zeros(steps, device=device)
    for step, ids in enumerate(islice(batches(corpus(), options.sequences), steps)):
        ids = ids.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step] = loss.detach()
        if step == 0:
            sites = precisionpass.report(model).sites
            attention = [site for site in sites if site.kind == "attention"]
            assert {site.decision for site in attention} == {"rewritten"}, attention
            assert all(("matmul" in site.settings) == bool(settings) for site in attention)
    return [statistics.mean(part.tolist()) for part in found.tensor_split(PARTS)]


def draw(report: dict) -> str:
    """The curves after the first tenth, where they are apart by more than a line is wide."""
    curves, steps, height = report["losses"], report["steps"], 360
    shown = range(len(curves["BF16"]) // 10, len(curves["BF16"]))
    values = [curve[part] for curve in curves.values() for part in shown]
    x = scale(shown[0] + 1, PARTS, 70, WIDTH - 170)
    y = scale(min(values), max(values), height - 52, 46)
    parts = [title(f"Loss of GPT-2, {report['parameters'] / 1e6:.1f} M parameters, nats a byte, {steps} steps")]
    for share in range(5):
        level = min(values) + (max(values) - min(values)) * share / 4
        parts.append(f'<line x1="70" x2="{WIDTH - 170}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>')
        parts.append(text(60, y(level) + 4, f"{level:.2f}", "end", "quiet"))
    for number, (colour, (name, curve)) in enumerate(zip(COLOURS, curves.items(), strict=False)):
        places = " ".join(f"{x(part + 1):.1f},{y(curve[part]):.1f}" for part in shown)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{WIDTH - 158}" cy="{60 + 22 * number}" r="5" fill="{colour}"/>')
        parts.append(text(WIDTH - 146, 64 + 22 * number, name, "start"))
    parts.append(text(x(PARTS), height - 30, f"means of {steps // PARTS} steps, the last at the right", "end", "quiet"))
    return document(height, "Loss of a small GPT-2 with FP8 attention and without", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    if options.draw:
        (ROOT / "docs" / "fp8_training.svg").write_text(draw(json.loads(options.draw.read_text())), encoding="utf-8")
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    size = sum(weight.numel() for weight in gpt2(0, options.layers, options.width).parameters())
    if options.device == "cpu":
        speed_up_bf16()
    report = {"device": device, "torch": torch.__version__, "steps": options.steps, "parameters": size, "losses": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.arms:
        torch._dynamo.reset()
        began = time.perf_counter()
        report["losses"][name] = losses(*ARMS[name], options)
        last = report["losses"][name][-1]
        print(f"{name:<20} last part: loss {last:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
        (options.out / "fp8_training.json").write_text(json.dumps(report, indent=1))
    if {"BF16", "FP8 forward"} <= report["losses"].keys():
        reference, found = (report["losses"][name][-1] for name in ("BF16", "FP8 forward"))
        print(f"FP8 against BF16: {100 * (found / reference - 1):+.2f} %")


if __name__ == "__main__":
    main()
