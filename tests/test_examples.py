"""Every example runs, alone, as a reader would run it; the demo says what it has to without a C++ compiler too."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MARK = "<!-- printed by examples/01_first_review.py -->"
EXAMPLES = Path(__file__).parents[1] / "examples"
SCRATCH = tempfile.mkdtemp()
ARGUMENTS = {
    "01_first_review.py": [],
    "02_train.py": ["--backend", "aot_eager", "--steps", "2"],
    "03_own_rules.py": [],
    "05_what_changed.py": [],
    "06_one_site.py": [],
    "07_fp8_attention.py": [],
    "08_monitor.py": [],
    "09_the_explosion.py": [
        "--seeds", "0", "--set", "steps=6", "--arithmetics", "float32", "ours", "--backend", "aot_eager",
        "--out", SCRATCH,
    ],
    "04_own_site.py": [],
}
SAID = {
    "01_first_review.py": [
        "12 attention sites rewritten",
        "transformer.h.{0-11}.attn",
        "softmax(QK^T * 0.125, j <= i)",
    ],
    "02_train.py": ["step 2: loss", "rewritten: model.layers.0.self_attn, model.layers.1.self_attn"],
    "04_own_site.py": ["own.squared_relu x 1", "implementation=own.one_rounding", "norm of a gradient: 78."],
    "05_what_changed.py": [
        "attention x 1  changed  transformer.h.3.attn", "decision: rewritten -> kept", "+  - id: not-the-last",
        "exit status for CI: 1",
    ],
    "06_one_site.py": ["def old(", "torch.ops.precisionpass.attention", "gradient of k_embed", "error "],
    "07_fp8_attention.py": ["refused, a rule asks for FP8 products", "FP8, scale by head"],
    "08_monitor.py": [
        "step 3: gradient norm", "transformer.h.1.attn: sequences 12, delta_bias", "spectral norm", "events: []",
    ],
    "09_the_explosion.py": ["ours              seed 0  step 6", "peak logit", "loss - FP32"],
    "03_own_rules.py": ["own_rules.yaml: good", "kept by rule first-layer-as-it-is", "'transformer.h.0.attn': 'kept'"],
}


@functools.cache
def run(name: str, *arguments: str, **environment: str) -> str:
    """What the example prints; it must end well, and on stderr there is nothing of ours where it is no terminal."""
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\r" not in ran.stderr
    return ran.stdout


def test_every_example_is_named_here():
    numbered = {file.name for file in EXAMPLES.glob("[0-9]*.py")}
    assert numbered == set(ARGUMENTS) == set(SAID)


def test_examples_are_short():
    lengths = {file.name: len(file.read_text().splitlines()) for file in EXAMPLES.glob("*.py")}
    assert not {name: length for name, length in lengths.items() if name in ARGUMENTS and length > 60}
    assert max(lengths.values()) <= 220


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_example_runs(name):
    said = run(name, *ARGUMENTS[name])
    assert [words for words in SAID[name] if words not in said] == []


def test_the_readme_shows_what_the_first_example_prints(request):
    readme = EXAMPLES.parent / "README.md"
    before, rest = readme.read_text().split(MARK)
    after = rest.split("<!-- end -->", 1)[1]
    said = run("01_first_review.py").rpartition("\n\n")[0]
    made = f"{before}{MARK}\n```\n{said}\n```\n<!-- end -->{after}"
    if request.config.getoption("--update-golden"):
        readme.write_text(made)
    assert readme.read_text() == made, "run: pytest tests/test_examples.py -k readme --update-golden"


def test_the_demo_without_a_compiler(tmp_path):
    said = run("demo.py", "--steps", "2", "--batches", "1", "--review", str(tmp_path / "reviews"), CXX="/no/compiler")
    assert "There is no C++ compiler here" in said and "aot_eager" in said
    for model in ("GPT-2", "Llama"):
        assert f"{model}: 9." in said
    assert said.count("3 attention sites rewritten") == said.count("precisionpass / as it is:") == 2
    assert said.count("geometric mean") == said.count("persistent sink, 3") == 2
    for folder in ("gpt2", "llama"):
        assert str(tmp_path / "reviews" / folder / "index.html") in said
        assert (tmp_path / "reviews" / folder / "index.html").is_file()
