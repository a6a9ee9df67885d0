"""A whole training step: plain torch.compile with eager attention and with SDPA, beside precisionpass.compile.

    python benchmarks/step.py                                # this CPU, the GPT-2 of `make demo`, BF16 and FP32
    python benchmarks/step.py --device cuda                  # GPT-2 124M and a Llama shape, BF16, fused AdamW
    python benchmarks/step.py --problems NAME --out FILE.json

The candidates of a problem take turns in one process: compare inside one run only. Medians of --rounds steps (forward,
backward, AdamW). Peak memory: on a GPU what torch allocates, weights and optimizer too; on a CPU how far the resident
size of a process of its own rises in a step above what it is between steps. precisionpass starts from the model with
eager attention.
On a CPU without BF16 instructions the products of BF16 matrices go through FP32 as in the demo; --native: they do not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import small_models

import precisionpass

CANDIDATES = ("eager", "sdpa", "precisionpass")


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


def demo(length: int, dtype: torch.dtype) -> Problem:
    """The GPT-2 of the demo, 512 tokens a batch."""
    return Problem(
        lambda attention: small_models.gpt2(length=length, attn_implementation=attention),
        512 // length, length, 256, dtype,
    )  # fmt: skip


def large(config: transformers.PretrainedConfig, batch: int, length: int) -> Problem:
    """A model of this configuration on a GPU in BF16."""

    def make(attention: str) -> torch.nn.Module:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model.loss_type = "ForCausalLM"
        return model.train()

    return Problem(make, batch, length, config.vocab_size, torch.bfloat16, "cuda", {"fused": True})


GPT2 = transformers.GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LLAMA = transformers.LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=32000, max_position_embeddings=4096, use_cache=False,
)  # fmt: skip
PROBLEMS = {
    "cpu": {
        "gpt2-demo-bf16": demo(128, torch.bfloat16),
        "gpt2-demo-fp32": demo(128, torch.float32),
        "gpt2-demo-512-bf16": demo(512, torch.bfloat16),
        "gpt2-demo-512-fp32": demo(512, torch.float32),
    },
    "cuda": {"gpt2-124m": large(GPT2, 16, 1024), "llama-shape": large(LLAMA, 2, 4096)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole training steps, side by side.")
    parser.add_argument("--device", choices=tuple(PROBLEMS), default="cpu")
    parser.add_argument("--problems", nargs="+", help="all of the device's")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each candidate (15)")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--native", action="store_true", help="BF16 products as this CPU's PyTorch computes them")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--memory-of", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.native and options.device == "cpu":
        small_models.speed_up_bf16()
    problems = {name: PROBLEMS[options.device][name] for name in options.problems or PROBLEMS[options.device]}
    if options.memory_of:
        problem = next(iter(problems.values()))
        print(json.dumps(cpu_peak(step_of(problem, options.memory_of, options.backend))))
        return
    rows = []
    print(f"{'problem':<20}{'candidate':<15}{'ms a step':>10}{'of eager':>9}", end="")
    print(f"{'tokens/s':>10}{'peak MiB':>10}{'of eager':>9}")
    for name, problem in problems.items():
        found = measured(name, problem, options)
        for row in found:
            first = found[0]
            print(
                f"{name:<20}{row['candidate']:<15}{row['ms']:>10.1f}{row['ms'] / first['ms']:>9.2f}"
                f"{1e3 * problem.batch * problem.length / row['ms']:>10.0f}"
                f"{row['peak_mib']:>10.0f}{row['peak_mib'] / first['peak_mib']:>9.2f}",
                flush=True,
            )
        rows += found
    if options.out:
        options.out.write_text(json.dumps({"versions": versions(options.device), "rows": rows}, indent=1) + "\n")


def measured(name: str, problem: Problem, options: argparse.Namespace) -> list[dict]:
    """One row a candidate: median time of interleaved steps, and peak memory."""
    steps: dict[str, Callable[[], None]] = {}
    times: dict[str, list[float]] = {candidate: [] for candidate in CANDIDATES}
    peaks = {}
    for candidate in CANDIDATES:
        others = torch.cuda.memory_allocated() if problem.device == "cuda" else 0
        step = steps[candidate] = step_of(problem, candidate, options.backend)
        for _ in range(3):  # compiles, then settles
            step()
        if problem.device == "cuda":
            peaks[candidate] = cuda_peak(step) - others
    for _ in range(options.rounds):
        for candidate, step in steps.items():
            synchronize(problem.device)
            began = time.perf_counter()
            step()
            synchronize(problem.device)
            times[candidate].append(1e3 * (time.perf_counter() - began))
    for candidate in CANDIDATES:
        if problem.device == "cpu":
            arguments = ["--problems", name, "--backend", options.backend, "--memory-of", candidate]
            arguments += ["--native"] if options.native else []
            ran = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
            peaks[candidate] = json.loads(ran.stdout.splitlines()[-1])
    return [
        {"problem": name, "candidate": candidate, "ms": statistics.median(times[candidate]), "all_ms": times[candidate],
         "peak_mib": peaks[candidate] / 2**20}
        for candidate in CANDIDATES
    ]  # fmt: skip


def step_of(problem: Problem, candidate: str, backend: str) -> Callable[[], None]:
    """One training step of a candidate, on one batch that stays the same."""
    torch.manual_seed(0)
    ids = torch.randint(0, problem.vocabulary, (problem.batch, problem.length), device=problem.device)
    model = problem.make("sdpa" if candidate == "sdpa" else "eager").to(problem.dtype)
    if candidate == "precisionpass":
        precisionpass.compile(model, rules="stable-bf16", backend=backend)
    else:
        model.compile(backend=backend)
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
