"""One site alone, as it was and as it is now, against float64: the file that a review writes for it, run.

python examples/06_one_site.py
"""

import runpy
import tempfile
from pathlib import Path

import torch
from small_models import LENGTH, llama

import precisionpass
from precisionpass.measure import compare

model = llama(layers=2, width=256, attn_implementation="eager").bfloat16()
ids = torch.zeros(2, LENGTH, dtype=torch.long)

with tempfile.TemporaryDirectory() as folder:
    precisionpass.explain(model, (), {"input_ids": ids, "labels": ids}).save(folder)
    (file,) = Path(folder).glob("repro_*self_attn.py")
    print(file.read_text().split("\n\n\ndef inputs")[0])  # the site before and after, as code
    site = runpy.run_path(str(file))

# The file's own inputs are normal numbers. Any others do: here the first key is what nearly every query looks for.
inputs = site["inputs"]()
name = next(name for name in inputs if name.startswith("k"))
inputs[name][..., 0, :] *= 4
for row in compare(site["old"], site["new"], inputs):
    error, bias = f"{row.old_error:.1e} -> {row.new_error:.1e}", f"{row.old_bias:+.1e} -> {row.new_bias:+.1e}"
    print(f"{row.name:<28} error {error}   bias {bias}")
