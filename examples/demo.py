"""The main job: train two small models as they are and through precisionpass, in BF16 on a CPU, and compare.

    make demo            # or: python examples/demo.py [--steps N] [--review FOLDER]

GPT-2 (attention written out) and Llama (scaled_dot_product_attention) of about 10 M parameters, random weights, the
sources of Python's standard library as text. Every figure printed is measured here and now.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

import torch
from measuring import attention_of, bias, eager, flash_style, fused, gradient_error, gradients, ours
from small_models import LENGTH, batches, corpus, gpt2, llama, speed_up_bf16

import precisionpass
from precisionpass.numerics.generators import persistent_sink

SEQUENCES = 4  # of a batch
SEEDS = (1, 2, 3)  # of the sinks that bias is measured on
SEVERAL = {"GPT-2": (gpt2, "eager", eager), "Llama": (llama, "sdpa", fused)}
BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GPT-2 and Llama with and without precisionpass.")
    parser.add_argument("--steps", type=int, default=24, help="training steps of each model (24)")
    parser.add_argument("--batches", type=int, default=3, help="batches that gradients are compared on (3)")
    parser.add_argument("--review", type=Path, default=Path("demo_review"), help="folder for the reviews (demo_review)")
    parser.add_argument("--only", choices=tuple(SEVERAL), help="one of the models, in this process")
    options = parser.parse_args()
    if options.only:
        return one_model(
            options.only, options.steps, options.batches, options.review / options.only.lower().replace("-", "")
        )
    started = time.perf_counter()
    chosen_backend(say=True)
    counts = ["--steps", str(options.steps), "--batches", str(options.batches)]
    arguments = [sys.executable, __file__, *counts, "--review", str(options.review), "--only"]
    running = [subprocess.Popen([*arguments, name], stdout=subprocess.PIPE, text=True) for name in SEVERAL]
    for child in running:  # both at once, one thread each; printed in order
        print(child.communicate()[0], flush=True)
    print(f"Done in {time.perf_counter() - started:.0f} s.")
    sys.exit(any(child.returncode for child in running))


def one_model(name: str, steps: int, compared: int, review: Path) -> None:
    """Train, compare and print."""
    make, attention, its_attention = SEVERAL[name]
    backend, in_fp32, text = chosen_backend(), speed_up_bf16(), corpus()
    plain, through = (make(attn_implementation=attention).bfloat16() for _ in range(2))
    size = sum(weight.numel() for weight in plain.parameters()) / 1e6
    headline(f"{name}: {size:.1f} M parameters, BF16, {attention} attention, batches of {SEQUENCES} x {LENGTH} bytes")
    if in_fp32:
        print("(No BF16 instructions here: BF16 products are computed in FP32 and rounded once, for both models.)")
    plain.compile(backend=backend)
    precisionpass.compile(through, rules="stable-bf16", review=str(review), backend=backend)
    losses, seconds = train_both(name, plain, through, text, steps)
    print(precisionpass.report(through))
    show_losses(losses, seconds, backend)
    show_gradient_errors(name, plain, through, text, compared)
    show_bias(plain, its_attention, text)
    print(f"\nThe review, with the graphs before and after: {review.absolute()}/index.html")


def chosen_backend(say: bool = False) -> str:
    """Inductor, which needs a C++ compiler on a CPU, else aot_eager."""
    if shutil.which(os.environ.get("CXX", "g++")):
        return "inductor"
    if say:
        print('There is no C++ compiler here (g++, or what CXX names): the models run with backend="aot_eager".')
    return "aot_eager"


def train_both(name, plain, through, text, steps):
    """The losses of both models, step by step on the same batches, and the seconds of each step but the first."""
    models = {"as it is": plain, "precisionpass": through}
    optimizers = {arm: torch.optim.AdamW(model.parameters(), lr=5e-4) for arm, model in models.items()}
    losses, seconds = ({arm: [] for arm in models} for _ in range(2))
    for step, ids in zip(range(steps), batches(text, SEQUENCES), strict=False):
        for arm, model in models.items():
            progress(f"{name}: step {step + 1} of {steps}" + (f", compiling {arm}" if step == 0 else ""))
            began = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizers[arm].step()
            optimizers[arm].zero_grad()
            seconds[arm].append(time.perf_counter() - began)
            losses[arm].append(float(loss.detach()))
    progress("")
    return losses, seconds


def show_losses(losses, seconds, backend) -> None:
    """Both curves, and the loss at some steps side by side."""
    top, bottom = max(map(max, losses.values())), min(map(min, losses.values()))
    print(f"Loss, nats a byte, step by step, from {top:.2f} (full bar) to {bottom:.2f}:")
    for arm, curve in losses.items():
        print(f"    {arm:<14}{''.join(BARS[round((loss - bottom) / (top - bottom or 1) * 7)] for loss in curve)}")
    steps = len(losses["as it is"])
    parts = [range(start, min(start + -(-steps // 6), steps)) for start in range(0, steps, -(-steps // 6))]
    print(f"    {'mean of steps':<14}" + "".join(f"{f'{part[0] + 1}-{part[-1] + 1}':>9}" for part in parts))
    for arm, curve in losses.items():
        print(f"    {arm:<14}" + "".join(f"{statistics.mean(curve[step] for step in part):9.3f}" for part in parts))
    typical = {arm: statistics.median(times[1:] or times) for arm, times in seconds.items()}
    for arm, times in seconds.items():
        first = f"the first: {times[0]:.0f} s, with torch.compile, {backend}"
        print(f"    {arm:<14}{typical[arm]:.2f} s a step (median; {first})")
    print(f"    precisionpass / as it is: {typical['precisionpass'] / typical['as it is']:.2f} of the time")


def show_gradient_errors(name, plain, through, text, compared) -> None:
    """The error of all gradients against a float64 copy with the same weights, on batches of their own."""
    through.load_state_dict(plain.state_dict())
    double = SEVERAL[name][0](attn_implementation="eager").double()
    double.load_state_dict(plain.state_dict())
    print("\nGradients against a float64 copy with the weights just trained (norm of the error / norm):")
    print(f"    {'batch':<14}{'as it is':>14}{'precisionpass':>16}{'ratio':>8}")
    ratios = []
    for seed in range(1, compared + 1):
        progress(f"{name}: gradients in float64, batch {seed} of {compared}")
        ids = next(batches(text, SEQUENCES, seed))
        true = gradients(double, ids)
        before, after = (gradient_error(gradients(model, ids), true) for model in (plain, through))
        ratios.append(after / before)
        progress("")
        print(f"    {seed:<14}{before:>14.2e}{after:>16.2e}{ratios[-1]:>8.2f}")
    print(f"    {'geometric mean':<44}{statistics.geometric_mean(ratios):>8.2f}")


def show_bias(model, its_attention, text) -> None:
    """The bias of three attentions on the same q, k, v and dO: those of the trained model, and a sink that fails."""
    own = attention_of(model, next(batches(text, SEQUENCES, SEEDS[0])))
    print("\nBias of attention: |mean rowsum dS| / mean sum |dO| P|V|, 0 in exact arithmetic (± standard error):")
    print(f"    {'inputs':<21}{'as it is':>18}{'flash-style':>18}{'precisionpass':>18}")
    cases = {"this model's": own} | {f"persistent sink, {seed}": persistent_sink(seed) for seed in SEEDS}
    for label, case in cases.items():
        figures = [bias(attend, case) for attend in (its_attention, flash_style, ours)]
        print(f"    {label:<21}" + "".join(f"{f'{size:.1e} ± {error:.0e}':>18}" for size, error in figures))
    print("    Below three standard errors it is no bias. flash-style: what fused kernels on GPUs do, emulated here;")
    print("    persistent sink: a token whose V is the same in every sequence, on which that arithmetic fails.")


def headline(words: str) -> None:
    print(f"\n{words}\n{'=' * len(words)}")


def progress(words: str) -> None:
    """One line on a terminal's stderr that the next one overwrites; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
