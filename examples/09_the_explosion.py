"""One small GPT on a saturated attention sink, trained under PyTorch's attention and ours: whose weights run away.

python examples/09_the_explosion.py [--seeds 0 1]      # a GPU: five seeds, some three minutes; a CPU: a smaller model

Writes explosion/: a table, CSV, JSON and a drawing, and goes on from what is there. What comes after the name goes to
benchmarks/explosion, which has more recipes and arithmetics; docs/proof.md says what they showed.
"""

import subprocess
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "explosion"
RECIPE = "scratch" if torch.cuda.is_available() else "scratch-small"

# Exact arithmetic to compare with, PyTorch's FlashAttention, and two settings of ours.
arithmetics = ["float32", "flash", "ours", "ours-recompute"]

command = [sys.executable, str(FOLDER), "--recipe", RECIPE, "--arithmetics", *arithmetics, *sys.argv[1:]]
sys.exit(subprocess.run(command).returncode)
