"""Every graph, child graph, recompilation and process has its place in a review, and the bytes are always the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import precisionpass
from precisionpass.review.report import Report
from tests.review.test_code import Broken, Checkpointed
from tests.small_models import Block, Stack

ROOT = Path(__file__).parents[2]
AGAIN = "graph 1 is graph 0 compiled again, for other inputs"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(file.name for file in folder.glob(pattern))


def compiled(model: nn.Module, folder: Path, *lengths: int) -> Report:
    precisionpass.compile(model, backend="eager", review=folder, dynamic=False)
    for length in lengths:
        model(torch.randn(2, length, 32))
    return precisionpass.report(model)


def test_a_recompilation_is_a_graph_of_its_own_and_says_whose(tmp_path):
    report = compiled(Block(), tmp_path, 6, 8)
    assert names(tmp_path, "graph_*.after.py") == ["graph_0.after.py", "graph_1.after.py"]
    assert names(tmp_path, "repro_*") == ["repro_0.attention.py", "repro_1.attention.py"]
    assert [site.facts["seq_q"] for site in report.sites if site.kind == "attention"] == [6, 8]
    assert report.events == (AGAIN,)
    assert AGAIN in (tmp_path / "index.html").read_text() and AGAIN in (tmp_path / "summary.txt").read_text()


def test_graphs_after_a_break_are_no_recompilation(tmp_path):
    report = compiled(Broken(), tmp_path, 6)
    assert names(tmp_path, "graph_*.diff") == ["graph_0.diff", "graph_1.diff"]
    assert report.events == ()


def test_child_graphs_have_files_of_their_own_and_stand_in_their_parents(tmp_path):
    compiled(Checkpointed(), tmp_path, 6)
    assert names(tmp_path, "graph_*.diff") == ["graph_0.0.diff", "graph_0.1.diff", "graph_0.diff"]
    assert (tmp_path / "graph_0.after.py").read_text().count("= torch.ops.precisionpass.attention") == 2
    assert (tmp_path / "graph_0.1.after.py").read_text().count("= torch.ops.precisionpass.attention") == 1
    assert names(tmp_path, "repro_*")[0].startswith("repro_0.0.")


def test_every_process_of_several_has_a_folder_of_its_own(tmp_path, monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 2)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    compiled(Block(), tmp_path, 6)
    assert names(tmp_path, "*") == ["rank_2"]
    assert (tmp_path / "rank_2" / "index.html").exists()


CODE = """
import sys, torch, precisionpass
from tests.review.test_code import Checkpointed
torch.manual_seed(int(sys.argv[2]))
precisionpass.explain(Checkpointed(), (torch.randn(2, 6, 32),)).save(sys.argv[1])
"""


def test_two_runs_give_the_same_bytes_whatever_the_hash_order_and_the_weights(tmp_path):
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = [sys.executable, "-c", CODE, str(tmp_path / seed), seed]
        subprocess.run(run, env=environment, check=True, cwd=ROOT)
    one, other = ({file.name: file.read_bytes() for file in (tmp_path / seed).iterdir()} for seed in ("1", "2"))
    assert one == other
    assert len(one) >= 15
    assert not [name for name, content in one.items() if str(ROOT).encode() in content or b" at 0x" in content]


def test_a_folder_that_cannot_be_written_leaves_the_model_and_its_result_alone():
    """/proc takes no folder from anybody, as a read-only disk does."""
    model, x = Block(), torch.randn(2, 6, 32)
    expected = model(x)
    precisionpass.compile(model, backend="eager", review="/proc/review")
    with pytest.warns(UserWarning, match="the review could not be written"):
        result = model(x)
    torch.testing.assert_close(result, expected)
    assert "the review could not be written: /proc/review" in precisionpass.report(model).events[0]
    with pytest.raises(precisionpass.PrecisionPassError, match="the review could not be written"):
        precisionpass.report(model).save("/proc/review")


def test_80_layers_and_2000_nodes_are_a_small_page(tmp_path):
    report = precisionpass.explain(Stack(80), (torch.randn(1, 4, 32),))
    report.save(tmp_path)
    assert report.nodes > 2000 and sum(site.kind == "attention" for site in report.sites) == 80
    page = (tmp_path / "index.html").read_bytes()
    assert len(page) < 1_000_000
    assert page.count(b"<article") == 2
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 6_000_000
