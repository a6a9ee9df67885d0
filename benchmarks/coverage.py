"""How many attention sites and norms of real architectures are found and rewritten: the families of transformers.

    python benchmarks/coverage.py [--family causal seq2seq masked image] [--only WORD] [--limit N] [--out FILE.json]

Every configuration class of an auto model is made small, given random weights and run in eager mode, where
counting.py counts what runs. Then: precisionpass.explain against the counts, precisionpass.compile(backend="aot_eager")
against eager's output, and the attention ops that really ran. What transformers itself cannot make small or run is
left out and counted as such. Everything is done twice, with attention written out ("eager") and fused ("sdpa").
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import signal
import sys
import warnings
from datetime import date
from pathlib import Path

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto

import precisionpass

sys.path.insert(0, str(Path(__file__).parent))
from counting import Counting

FAMILIES = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", transformers.AutoModelForCausalLM),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", transformers.AutoModelForSeq2SeqLM),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", transformers.AutoModelForMaskedLM),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", transformers.AutoModelForImageClassification),
}
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim",
                     "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim", "encoder_ffn_dim",
                     "decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    "vocab_size": 128, "image_size": 32, "patch_size": 8, "n_positions": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "attention_type": "original_full",
}  # fmt: skip
LARGEST = 30_000_000  # parameters: what is larger has not become small
TOLERANCE = 2e-4  # of the largest value of an output, FP32


def main() -> None:
    parser = argparse.ArgumentParser(description="Sites found and rewritten in the model families of transformers.")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--only", default="", help="model types that contain this")
    parser.add_argument("--limit", type=int, help="so many model types of each family")
    parser.add_argument("--seconds", type=int, default=120, help="for one model")
    parser.add_argument("--out", type=Path, help="also write every model's figures as JSON")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for family in options.family:
        names = [name for name in getattr(modeling_auto, FAMILIES[family][0]) if options.only in name]
        for name in names[: options.limit]:
            for attention in ("eager", "sdpa"):
                rows.append({"family": family, "model": name, "attention": attention})
                with contextlib.suppress(Skipped):
                    rows[-1] |= one(family, name, attention, options.seconds)
                    show(rows[-1])
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


class Skipped(Exception):
    """transformers does not make or run this one."""


def one(family: str, name: str, attention: str, seconds: int) -> dict:
    """The counts of one model, true, found, rewritten and executed."""
    with limit(seconds):
        try:
            model, inputs = made(family, name, attention)
            with torch.no_grad():
                expected = outputs(model(**inputs))
                with Counting(model) as counting:
                    model(**inputs)
        except Exception as problem:
            raise Skipped from problem
        try:
            return {"true": dict(counting.counts), **passed(model, inputs, expected)}
        except Exception as problem:  # noqa: BLE001  (whatever it is counts against the pass)
            return {"true": dict(counting.counts), "error": f"{type(problem).__name__}: {str(problem)[:200]}"}


def passed(model: torch.nn.Module, inputs: dict, expected: list[torch.Tensor]) -> dict:
    """What the pass finds and does."""
    torch._dynamo.reset()
    with torch.no_grad():
        report = precisionpass.explain(model, (), inputs)
        torch._dynamo.reset()
        compiled = precisionpass.compile(model, backend="aot_eager")
        found = outputs(compiled(**inputs))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            compiled(**inputs)
    ran = sum(event.count for event in profiler.key_averages() if event.key == "precisionpass::attention")
    counts = collections.Counter()
    for site in report.sites:
        counts[site.kind] += site.count
        counts[f"{site.kind} rewritten"] += site.count * (site.decision == "rewritten")
        counts["unnamed"] += not site.module
    same = [(a - b).abs().max() <= TOLERANCE * a.abs().max() for a, b in zip(expected, found, strict=True)]
    reasons = sorted({miss.reason for miss in report.near_misses if miss.kind == "attention"})
    return {"found": dict(counts), "executed": ran, "same": bool(all(same)), "reasons": reasons}


def made(family: str, name: str, attention: str) -> tuple[torch.nn.Module, dict]:
    """A small model of this type with random weights in inference mode, and its inputs."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name)
    small = {key: value for key, value in SMALL.items() if hasattr(config, key)}
    config = transformers.AutoConfig.for_model(name, **small)
    with torch.device("meta"):
        shape = FAMILIES[family][1].from_config(config, attn_implementation=attention)
    if sum(parameter.numel() for parameter in shape.parameters()) > LARGEST:
        raise Skipped
    model = FAMILIES[family][1].from_config(config, attn_implementation=attention).eval()
    if family == "image":
        size = getattr(config, "image_size", 32)
        size = (size, size) if isinstance(size, int) else tuple(size)
        return model, {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), *size)}
    inputs = {"input_ids": torch.randint(3, 100, (2, 12))}
    return model, inputs | ({"decoder_input_ids": torch.randint(3, 100, (2, 7))} if family == "seq2seq" else {})


def outputs(result) -> list[torch.Tensor]:
    """Every floating tensor of a model's output."""
    leaves = tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@contextlib.contextmanager
def limit(seconds: int):
    def ring(*_):
        raise TimeoutError(f"over {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def sums(rows: list[dict]) -> dict[str, int]:
    """The columns of the table for some models."""
    ran = [row for row in rows if "true" in row]
    c = collections.Counter(models=len(ran), left_out=len(rows) - len(ran))
    for row in ran:
        found, true = row.get("found", {}), row["true"]
        norms, true_norms = (sum(part.get(kind, 0) for kind in ("layer_norm", "rms_norm")) for part in (found, true))
        c["attention"] += true.get("attention", 0)
        c["found"] += min(found.get("attention", 0), true.get("attention", 0))
        c["more"] += max(0, found.get("attention", 0) - true.get("attention", 0))
        c["rewritten"] += min(found.get("attention rewritten", 0), true.get("attention", 0))
        c["executed"] += row.get("executed", 0)
        c["unnamed"] += found.get("unnamed", 0)
        c["norms"] += true_norms
        c["norms found"] += min(norms, true_norms)
        c["different"] += not row.get("same", True)
        c["errors"] += "error" in row
    return dict(c)


COLUMNS = ("models", "attention", "found", "rewritten", "executed", "more", "unnamed", "norms", "norms found",
           "different", "errors")  # fmt: skip


def table(rows: list[dict]) -> str:
    """Markdown: one line a family, one for all."""
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    families = [family for family in FAMILIES if any(row["family"] == family for row in rows)]
    for family in [*families, "all"]:
        c = sums([row for row in rows if family in ("all", row["family"])])
        lines.append(f"| {family} | " + " | ".join(str(c.get(column, 0)) for column in COLUMNS) + " |")
    left_out = sums(rows).get("left_out", 0)
    said = ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join([*lines, "", f"{left_out} of {len(rows)} left out. {said}"])


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "precisionpass": precisionpass.__version__, "date": str(date.today()),
    }  # fmt: skip


def show(row: dict) -> None:
    """One line for a model where anything is not as it was counted."""
    c = sums([row])
    differs = [f"{a} {c[b]}/{c[a]}" for a, b in (("attention", "found"), ("norms", "norms found")) if c[a] != c[b]]
    differs += [word for word in ("more", "different", "errors") if c.get(word)]
    differs += ["rewritten and not run"] if row.get("executed", 0) < c["rewritten"] else []
    if differs:
        print(f"{row['model']} {row['attention']}: {', '.join(differs)} {row.get('error', '')}", flush=True)


if __name__ == "__main__":
    main()
