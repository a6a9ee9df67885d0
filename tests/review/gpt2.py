"""A report as GPT-2 gives it: 12 layers, attention rewritten, norms kept, one near miss."""

from precisionpass.review.report import Call, Calls, NearMissRecord, Report, SiteRecord

RULES_FILE = "rules/stable-bf16.yaml"
LAYERS = 12


CALLS = Calls(
    before=(
        Call("q", "", "bf16[2, 4]"),
        Call("s", "q @ k", "bf16[2, 2]", ("q", "k"), "matmul"),
        Call("o", "s @ v", "bf16[2, 4]", ("s", "v"), "matmul"),
    ),
    after=(
        Call("q", "", "bf16[2, 4]"),
        Call("o", "attention(q, k, v)", "bf16[2, 4]", ("q", "k", "v"), "precisionpass.attention", ("scale=0.125",)),
    ),
    repro="repro_0.attn.py",
)


def attention(layer: int) -> SiteRecord:
    return SiteRecord(
        kind="attention",
        module=f"transformer.h.{layer}.attn",
        module_class="GPT2Attention",
        source="modeling_gpt2.py:64",
        graph="0",
        decision="rewritten",
        rule="attention",
        settings={
            "implementation": {"value": "auto", "rule": "attention", "file": RULES_FILE, "line": 14},
            "delta": {"value": "residual", "rule": "attention", "file": RULES_FILE, "line": 15},
        },
        reason="rewritten",
        message="the probabilities were rounded to bf16 and their sum was not",
        facts={"dtype": "bf16", "heads": 12, "head_dim": 64, "causal": True, "sinks": False, "scale": 0.125},
        formula="softmax(0.125 q kᵀ where j ≤ i) v",
        holds_while="seq_q >= 2",
        calls=CALLS if layer == 0 else None,
    )


def layer_norm(module: str, line: int) -> SiteRecord:
    return SiteRecord(
        kind="layer_norm",
        module=module,
        module_class="LayerNorm",
        source=f"modeling_gpt2.py:{line}",
        graph="0",
        decision="kept",
        reason="already_satisfied",
        message="the statistics are FP32 already and no rule asks for more",
        facts={"dtype": "bf16", "width": 768, "eps": 1e-5},
    )


def near_miss(module: str = "head.pool") -> NearMissRecord:
    return NearMissRecord(
        kind="attention",
        module=module,
        module_class="Pool",
        source="model.py:88",
        graph="0",
        reason="softmax_over_other_axis",
        message="the softmax runs over axis 1, the contraction with V over axis 3",
    )


def report(layers: int = LAYERS) -> Report:
    blocks = (
        (layer_norm(f"transformer.h.{i}.ln_1", 262), attention(i), layer_norm(f"transformer.h.{i}.ln_2", 277))
        for i in range(layers)
    )
    return Report(
        sites=(*(site for block in blocks for site in block), layer_norm("transformer.ln_f", 550)),
        near_misses=(near_miss(),),
        rules_name="stable-bf16",
        rules_digest="3f2a9c1d04be77aa",
        unused_rules=("softcap", "fp8"),
        events=("compiled again: seq_q was 128, is 256",) * 2,
        graphs=1,
        nodes=612,
        seconds=1.5,
        artifacts={
            "graph_0.before.py": "# before\n",
            "graph_0.after.py": "# after\n",
            "graph_0.diff": "-before\n+after\n",
        },
    )
