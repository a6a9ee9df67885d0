"""What another version of the rules changes in a model: two reviews side by side, and a status for CI.

    python examples/05_what_changed.py

The command line does the same with two review folders: precisionpass diff before/ after/ --html changes.html
"""

import tempfile
from pathlib import Path

import torch
from small_models import LENGTH, gpt2

import precisionpass
from precisionpass.review.compare import compare
from precisionpass.review.load import load_review

NEW = """
version: 1
extends: stable-bf16
rules:
  - id: not-the-last
    match: {op: attention, module: transformer.h.3.attn}
    apply: {implementation: keep}
"""

model = gpt2(layers=4, width=128).bfloat16()
ids = torch.zeros(2, LENGTH, dtype=torch.long)
inputs = {"input_ids": ids, "labels": ids}

with tempfile.TemporaryDirectory() as folder:
    before, after = Path(folder, "before"), Path(folder, "after")
    precisionpass.explain(model, (), inputs, rules="stable-bf16").save(before)

    # The new rules leave the last layer alone. Reviews are plain files: a team commits the first one.
    rules = Path(folder, "new.yaml")
    rules.write_text(NEW)
    precisionpass.explain(model, (), inputs, rules=rules).save(after)

    comparison = compare(load_review(before), load_review(after))
    print(comparison.text())
    print("exit status for CI:", int(comparison.differs))
