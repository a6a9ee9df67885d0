"""What the pass itself costs: our own time per graph node, beside torch's capture, on Llama with the shape of 70B.

    python benchmarks/overhead.py [--layers 4 20 80] [--out FILE.json] [--profile]

Weights lie on the meta device, so nothing is computed. Each size runs in a process of its own (peak memory is that
process's, torch included), the second of two explains in it is reported. Seconds are those of the processor: others
on the machine do not count. Aims: at most 2 ms a node, linear in layers,
12 s and 4 GiB at 80 layers. --profile names the functions that our time goes to.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import subprocess
import sys
import time
from pathlib import Path

WIDTH, HEADS, KEY_HEADS, INNER, LENGTH = 8192, 64, 8, 28672, 4096
PARTS = ("run", "make_shadow", "find_sites", "decide", "rewrite")  # pipeline.py: the whole and its stages


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the pass itself.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 20, 80])
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--profile", action="store_true", help="show where our time goes")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_size(options.one, options.profile)))
        return
    print(f"{'layers':>6}{'nodes':>8}{'ours s':>9}{'ms/node':>9}{'capture s':>11}{'peak GiB':>10}", end="")
    print("".join(f"{part:>13}" for part in PARTS[1:]))
    rows = []
    for layers in options.layers:
        arguments = [sys.executable, __file__, "--one", str(layers), *(["--profile"] if options.profile else [])]
        said = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout
        *profile, last = said.splitlines()
        row = json.loads(last)
        rows.append(row)
        print("\n".join(profile), end="\n" if profile else "")
        print(
            f"{row['layers']:>6}{row['nodes']:>8}{row['ours_s']:>9.2f}{row['ms_per_node']:>9.2f}"
            f"{row['capture_s']:>11.2f}{row['peak_gib']:>10.2f}"
            + "".join(f"{row['parts_s'][part]:>13.2f}" for part in PARTS[1:]),
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


def one_size(layers: int, profiled: bool) -> dict:
    """The figures of one size, in this process."""
    import torch

    import precisionpass
    from precisionpass import pipeline

    spent = dict.fromkeys(PARTS, 0.0)
    for part in PARTS:
        setattr(pipeline, part, timed(getattr(pipeline, part), spent, part))
    model = llama(layers)
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    profile = cProfile.Profile()
    if profiled:
        pipeline.run = profile_calls(profile, pipeline.run)
    for _ in range(2):
        spent.update(dict.fromkeys(PARTS, 0.0))
        began = time.process_time()
        report = precisionpass.explain(model, (), {"input_ids": ids, "labels": ids}, rules="stable-bf16")
        whole = time.process_time() - began
        torch.compiler.reset()
    attention = sum(site.kind == "attention" and site.decision == "rewritten" for site in report.sites)
    assert attention == layers, f"{attention} of {layers} attention sites were rewritten:\n{report}"
    if profiled:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    return {
        "layers": layers,
        "nodes": report.nodes,
        "ours_s": spent["run"],
        "ms_per_node": 1e3 * spent["run"] / report.nodes,
        "capture_s": whole - spent["run"],
        "peak_gib": peak_bytes() / 2**30,
        "parts_s": spent,
    }


def llama(layers: int):
    """Llama with the width and heads of 70B, BF16, no memory behind its weights."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, use_cache=False, max_position_embeddings=LENGTH, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16().train()


def timed(function, spent: dict, name: str):
    """The function, its seconds added up under the name."""

    def run(*arguments):
        began = time.process_time()
        try:
            return function(*arguments)
        finally:
            spent[name] += time.process_time() - began

    return run


def profile_calls(profile: cProfile.Profile, function):
    """The function, profiled."""
    return lambda *arguments: profile.runcall(function, *arguments)


def peak_bytes() -> int:
    """The largest resident size this process has had (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def versions() -> dict:
    """What these figures were measured with."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    main()
