"""A whole training step: plain torch.compile with several attentions beside precisionpass.compile with several rules.

    python benchmarks/step.py                                # this CPU, the GPT-2 of `make demo`, BF16 and FP32
    python benchmarks/step.py --device cuda                  # GPT-2 124M, Llama and Gemma 2 shapes, BF16
    python benchmarks/step.py --problems NAME --candidates eager sdpa stable-bf16 fp32-statistics@sdpa --out FILE.json

A candidate is an attention of transformers (eager, sdpa, flex_attention) under plain torch.compile, or rules, whose
model has eager attention, or another after an @. Each runs in a process of its own; they compile side by side and then
take turns: compare inside one run only. Medians of --rounds turns; a turn is five steps (forward, backward, AdamW),
timed together after one more. Peak memory: on a GPU what torch allocates, weights and optimizer too; on a CPU how far
the resident size rises in a step above what it is between steps.
On a CPU without BF16 instructions the products of BF16 matrices go through FP32 as in the demo; --native: they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import small_models

import precisionpass

ATTENTIONS = ("eager", "sdpa", "flex_attention")
STEPS = 5  # of a turn


@dataclass(frozen=True)
class Problem:
    """A model and its batch. make: attention -> model in FP32."""

    make: Callable[[str], torch.nn.Module]
    batch: int
    length: int
    vocabulary: int
    dtype: torch.dtype
    device: str = "cpu"
    optimizer: dict = field(default_factory=dict)
    candidates: tuple[str, ...] = ("eager", "sdpa", "stable-bf16")


def demo(length: int, dtype: torch.dtype) -> Problem:
    """The GPT-2 of the demo, 512 tokens a batch."""
    return Problem(
        lambda attention: small_models.gpt2(length=length, attn_implementation=attention),
        512 // length, length, 256, dtype,
    )  # fmt: skip


def large(config: transformers.PretrainedConfig, batch: int, length: int, candidates: tuple[str, ...]) -> Problem:
    """A model of this configuration on a GPU in BF16."""

    def make(attention: str) -> torch.nn.Module:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model.loss_type = "ForCausalLM"
        return model.train()

    return Problem(make, batch, length, config.vocab_size, torch.bfloat16, "cuda", {"fused": True}, candidates)


GPT2 = transformers.GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LLAMA = transformers.LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=32000, max_position_embeddings=4096, use_cache=False,
)  # fmt: skip
GEMMA2 = transformers.Gemma2Config(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, vocab_size=32000, max_position_embeddings=4096, sliding_window=1024, use_cache=False,
)  # fmt: skip
PROBLEMS = {
    "cpu": {
        "gpt2-demo-bf16": demo(128, torch.bfloat16),
        "gpt2-demo-fp32": demo(128, torch.float32),
        "gpt2-demo-512-bf16": demo(512, torch.bfloat16),
        "gpt2-demo-512-fp32": demo(512, torch.float32),
    },
    "cuda": {
        "gpt2-124m": large(GPT2, 16, 1024, ("eager", "sdpa", "stable-bf16", "fp32-statistics@sdpa")),
        "llama-shape": large(
            LLAMA, 2, 4096, ("eager", "sdpa", "flex_attention", "stable-bf16", "fp32-statistics@sdpa")
        ),
        "gemma2-shape": large(GEMMA2, 2, 4096, ("eager", "flex_attention", "stable-bf16", "fp32-statistics")),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(PROBLEMS), default="cpu")
    parser.add_argument("--problems", nargs="+", help="all of the device's")
    parser.add_argument("--candidates", nargs="+", metavar="ATTENTION|RULES[@ATTENTION]", help="each problem's own")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each candidate (5)")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--native", action="store_true", help="BF16 products as this CPU's PyTorch computes them")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    problems = {name: PROBLEMS[options.device][name] for name in options.problems or PROBLEMS[options.device]}
    if options.serve:
        serve(next(iter(problems.values())), options)
        return
    rows = []
    print(f"{'problem':<20}{'candidate':<22}{'ms a step':>10}{'of first':>9}", end="")
    print(f"{'tokens/s':>10}{'peak MiB':>10}{'of first':>9}", flush=True)
    for name, problem in problems.items():
        found = measured(name, options.candidates or problem.candidates, options)
        for row in found:
            first = found[0]
            print(
                f"{name:<20}{row['candidate']:<22}{row['ms']:>10.1f}{row['ms'] / first['ms']:>9.3f}"
                f"{1e3 * problem.batch * problem.length / row['ms']:>10.0f}"
                f"{row['peak_mib']:>10.0f}{row['peak_mib'] / first['peak_mib']:>9.2f}",
                flush=True,
            )
        rows += found
        if options.out:
            options.out.write_text(json.dumps({"versions": versions(options.device), "rows": rows}, indent=1) + "\n")


def measured(name: str, candidates: Sequence[str], options: argparse.Namespace) -> list[dict]:
    """One row a candidate: median time of its steps, and peak memory. One that fails is left out, and said so."""
    arguments = [sys.executable, __file__, "--device", options.device, "--problems", name, "--backend", options.backend]
    arguments += ["--native"] if options.native else []
    processes = {
        candidate: subprocess.Popen(
            [*arguments, "--serve", candidate], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for candidate in candidates
    }
    rows = {candidate: answer(process) for candidate, process in processes.items()}
    times: dict[str, list[float]] = {candidate: [] for candidate, row in rows.items() if row is not None}
    for _ in range(options.rounds):
        for candidate, found in times.items():
            if (time_of_step := answer(processes[candidate], "turn")) is not None:
                found.append(time_of_step)
    for process in processes.values():
        process.communicate()
    print("".join(f"{name}: {candidate} failed\n" for candidate in candidates if not times.get(candidate)), end="")
    return [
        {"problem": name, "candidate": candidate, "ms": statistics.median(found), "all_ms": found, **rows[candidate]}
        for candidate, found in times.items()
        if found
    ]


def answer(process: subprocess.Popen, ask: str = "") -> Any:
    """What a process answers, None where it has ended."""
    if ask:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{ask}\n")
            process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line else None


def serve(problem: Problem, options: argparse.Namespace) -> None:
    """Compile, answer the peak memory of a step, and then the time of a step as often as asked."""
    if not options.native and options.device == "cpu":
        small_models.speed_up_bf16()
    step = step_of(problem, options.serve, options.backend)
    for _ in range(3):  # compiles, then settles
        step()
    peak = cuda_peak(step) if problem.device == "cuda" else cpu_peak(step)
    print(json.dumps({"peak_mib": peak / 2**20}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(step, problem.device)), flush=True)


def timed(step: Callable[[], None], device: str) -> float:
    """Milliseconds of a step, over STEPS of them."""
    step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began) / STEPS


def step_of(problem: Problem, candidate: str, backend: str) -> Callable[[], None]:
    """One training step of a candidate, on one batch that stays the same."""
    torch.manual_seed(0)
    ids = torch.randint(0, problem.vocabulary, (problem.batch, problem.length), device=problem.device)
    rules, _, attention = candidate.partition("@")
    plain = rules in ATTENTIONS
    model = problem.make(rules if plain else attention or "eager").to(problem.dtype)
    if plain:
        model.compile(backend=backend)
    else:
        precisionpass.compile(model, rules=rules, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **problem.optimizer)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cuda_peak(step: Callable[[], None]) -> float:
    """Bytes that torch had allocated at most in a step."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def cpu_peak(step: Callable[[], None]) -> float:
    """Bytes by which this process's resident size rises in a step above its smallest size before one (Linux)."""
    rises = []
    for _ in range(6):
        gc.collect()
        trim()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = resident("VmRSS")
        step()
        rises.append(resident("VmHWM") - before)
    return statistics.median(rises[2:])


def trim() -> None:
    """Give freed memory back, so that the next step's shows."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)


def resident(which: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def versions(device: str) -> dict:
    """What these figures were measured with."""
    where = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
            "device": where, "threads": torch.get_num_threads()}  # fmt: skip


if __name__ == "__main__":
    main()
