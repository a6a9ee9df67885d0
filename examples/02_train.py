"""Train through precisionpass: one line more than without, same object, same weight names.

python examples/02_train.py [--backend aot_eager]      # no C++ compiler: aot_eager
"""

import argparse

import torch
from small_models import batches, corpus, llama

import precisionpass

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="inductor")
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

model = llama(layers=2, width=256).bfloat16()
names = list(model.state_dict())

precisionpass.compile(model, rules="stable-bf16", backend=options.backend)  # in place; review="review/" writes it

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, ids in zip(range(options.steps), batches(corpus(), sequences=2), strict=False):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss:.3f}")

assert precisionpass.is_active(model)
assert list(model.state_dict()) == names  # checkpoints fit the model with and without precisionpass
rewritten = [site.module for site in precisionpass.report(model).sites if site.decision == "rewritten"]
print("rewritten:", ", ".join(rewritten))
