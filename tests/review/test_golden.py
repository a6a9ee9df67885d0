"""Whole reviews of four models, as a team would commit them: what changes, here or in a library, shows as a diff.

`pytest tests/review/test_golden.py --update-golden` writes tests/golden/reviews anew; read what changed.
"""

import json
from pathlib import Path

import pytest
import torch

import precisionpass
from tests.review.near_misses import NearMisses
from tests.small_models import family

MODELS = ("gpt2", "llama", "t5", "near_misses")
# What a person reads in a pull request. The page and the whole graphs are left out: they say the same at length.
READ = ("summary.txt", "why_not.txt", "rules.resolved.yaml", "graph_0.diff")
ALL = {*READ, "index.html", "report.json", "sites.jsonl", "graph_0.before.py", "graph_0.after.py"}


def report(name: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    if name == "near_misses":
        return precisionpass.explain(NearMisses().bfloat16(), (torch.randn(2, 8, 32).bfloat16(),))
    model, inputs = family(name, "eager" if name == "t5" else "sdpa", layers=2)
    return precisionpass.explain(model.bfloat16().train(), (), inputs)


@pytest.mark.parametrize("name", MODELS)
def test_the_review_is_the_one_that_was_read(name, golden, tmp_path):
    report(name).save(tmp_path)
    repros = sorted(file.name for file in tmp_path.glob("repro_*"))
    assert {file.name for file in tmp_path.iterdir()} == ALL | set(repros)
    for file in (*READ, *repros):
        golden(f"reviews/{name}/{file}", (tmp_path / file).read_text())
    known = Path(__file__).parents[1] / "golden" / "reviews" / name
    assert {file.name for file in known.iterdir()} == {*READ, *repros}, "a file of an older review is left over"


@pytest.mark.parametrize("name", MODELS)
def test_every_site_says_where_it_is_and_why(name):
    content = json.loads(report(name).to_json())
    for record in (*content["sites"], *content["near_misses"]):
        assert record["source"] and record["message"] and record["reason"]
    assert len(content["sites"]) + len(content["near_misses"]) >= 7
