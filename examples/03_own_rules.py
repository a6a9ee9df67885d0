"""Rules in a file of one's own, checked and applied by the command line, then the same rules from Python.

python examples/03_own_rules.py
"""

import importlib
import subprocess
import sys
from pathlib import Path

import precisionpass

HERE = Path(__file__).parent
RULES = HERE / "own_rules.yaml"
TARGET = HERE / "01_first_review.py"


def command(*arguments: str) -> str:
    """Run `python -m precisionpass`, which is the command precisionpass, and show what it says."""
    print("$ precisionpass", *arguments, flush=True)
    ran = subprocess.run([sys.executable, "-m", "precisionpass", *arguments], text=True, stdout=subprocess.PIPE)
    print(ran.stdout)
    assert ran.returncode == 0, "1: an expectation of the rules failed; 2: something was wrong with the input"
    return ran.stdout


# Mistakes in a rules file are named with line and column before torch is even loaded.
command("check", str(RULES))
command("explain", f"{TARGET}:make_model", "--rules", str(RULES), "--site", "transformer.h.[01].attn")

# The same rules written in Python: Rule and Match have the keys of the file.
keep_first = precisionpass.Rule(
    id="first-layer-as-it-is",
    match=precisionpass.Match(op="attention", module="transformer.h.0.*"),
    apply={"implementation": "keep"},
)
unbiased = precisionpass.Rule(id="the-others", match=precisionpass.Match(op="attention"), apply={"delta": "recompute"})
model, args, kwargs = importlib.import_module("01_first_review").make_model()
report = precisionpass.explain(model, args, kwargs, rules=[keep_first, unbiased])
attention = [site for site in report.sites if site.kind == "attention"]
print({site.module: site.decision for site in attention})
assert [site.decision for site in attention] == ["kept"] + ["rewritten"] * 11
