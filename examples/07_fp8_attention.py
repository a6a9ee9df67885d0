"""Attention with FP8 products: refused where there is no FP8, emulated where that is asked for, and what it costs.

python examples/07_fp8_attention.py
"""

import torch
from small_models import LENGTH, batches, corpus, llama

import precisionpass
from precisionpass import Match, Rule

ids = next(batches(corpus(), sequences=2))
exact = llama(layers=2).eval()
with torch.no_grad():
    truth = exact(input_ids=ids).logits


def error(rules: object) -> float:
    """How far the logits of the model in BF16 are from FP32's, under these rules."""
    model = llama(layers=2).bfloat16().eval()
    with torch.no_grad():
        precisionpass.compile(model, rules=rules, backend="aot_eager")
        logits = model(input_ids=ids).logits.float()
    return float((logits - truth).norm() / truth.norm())


# The preset says on_missing_fp8: refuse. A CPU has no FP8, so nothing is rewritten here, and the review says why.
report = precisionpass.explain(llama(layers=2).bfloat16().eval(), (), {"input_ids": ids}, rules="fp8-attention")
site = next(site for site in report.sites if site.kind == "attention")
print(f"{site.module}: {site.decision}, {site.message}")

# implementation: reference emulates it bit for bit, slowly, to see what it would cost before a GPU is at hand.
print(f"{LENGTH} tokens, error of the logits")
print(f"  BF16                  {error('stable-bf16'):.1e}")
for scale in ("tensor", "head", "row"):
    matmul = {"qk": "fp8_e4m3", "pv": "fp8_e4m3", "scale": scale}
    emulated = Rule(id="fp8", match=Match(op="attention"), apply={"implementation": "reference", "matmul": matmul})
    print(f"  FP8, scale by {scale:<7} {error([emulated]):.1e}")
