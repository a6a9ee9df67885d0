"""Watch attention while a model trains, step in FP32, and clip: the helpers of a long run on a short one.

python examples/08_monitor.py
"""

import torch
from small_models import batches, corpus, gpt2

import precisionpass
from precisionpass import Match, Rule

RULES = [
    Rule(
        id="watched", because="the bias is what adds up", match=Match(op="attention"),
        apply={
            "implementation": "auto",
            "record": ["delta_bias", "max_logit", "entropy", "nonfinite"],
            "escalate": {"when": "delta_bias_t > 6 and delta_bias > 1e-5", "to": {"delta": "recompute"}},
        },
    )
]  # fmt: skip

model = gpt2(layers=2, width=128).bfloat16()
precisionpass.compile(model, rules=RULES, backend="aot_eager")
monitor = precisionpass.monitor(model)

masters = precisionpass.MasterWeights(model)  # FP32 copies: the optimizer steps them, and rounds into the model
optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=1e-3))
spectral = precisionpass.SpectralMonitor(model, "*.c_attn.weight")

micro_batches = batches(corpus(), sequences=2)
for step in range(3):
    for _ in range(2):
        ids = next(micro_batches)
        model(input_ids=ids, labels=ids).loss.backward()
        masters.accumulate()  # in FP32
    norm = precisionpass.clip_grad_norm_(masters.parameters(), 1.0)  # stops where one is not finite
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: gradient norm {norm:.2f}")

for site, figures in monitor.read().items():
    shown = ", ".join(f"{name} {figures[name]:.3g}" for name in ("sequences", "delta_bias", "max_logit", "entropy"))
    print(f"{site}: {shown}")
for name, spectrum in spectral.update().items():
    print(f"{name}: spectral norm {spectrum.norm:.2f}")

monitor.check()  # raises for an alarm
print("events:", monitor.events)
checkpoint = {"model": model.state_dict(), "masters": masters.state_dict(), "monitor": monitor.state_dict()}
print("kept:", ", ".join(checkpoint))
