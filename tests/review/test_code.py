"""The graphs of a review are programs: what they compute is what the compiled model computes, bit for bit."""

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import precisionpass
from precisionpass.measure import compare
from tests.sites.spellings import ATTENTION
from tests.sites.test_spellings import tensors
from tests.small_models import Attention, Block, Stack, family


def load(file: Path):
    """A file of a review as a module."""
    found = importlib.util.spec_from_file_location("reviewed", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that wants a gradient where the tensor does: PyTorch chooses its kernels by that."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def recorded(calls: list):
    """An inner backend that runs a graph as it is and notes inputs and results."""

    def backend(module, _):
        def run(*inputs):
            kept = [own(x) if isinstance(x, torch.Tensor) else x for x in inputs]
            results = module(*inputs)
            calls.append((kept, results))
            return results

        return run

    return backend


def reviewed(model, inputs: dict, folder: Path, dynamic: bool | None = None) -> None:
    """Compile and run the model with a review and without precisionpass; the files must compute the same."""
    for moment in ("after", "before"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        calls: list = []
        twin = copy.deepcopy(model)
        if moment == "after":
            precisionpass.compile(twin, backend=recorded(calls), review=folder, dynamic=dynamic)
        else:
            twin.compile(backend=recorded(calls), dynamic=dynamic)
        twin(**inputs)
        assert len(calls) == len(list(folder.glob("graph_[0-9].before.py")))
        for number, (given, results) in enumerate(calls):
            again = load(folder / f"graph_{number}.{moment}.py").graph(*given)
            assert len(again) == len(results) > 0
            assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True) if isinstance(a, torch.Tensor))


def compared(folder: Path) -> list:
    """What every repro file measures."""
    return [row for file in sorted(folder.glob("repro_*.py")) for row in rows(load(file))]


def rows(module) -> tuple:
    return compare(module.old, module.new, module.inputs())


@pytest.mark.parametrize(
    ("name", "attention"), [("gpt2", "eager"), ("llama", "sdpa"), ("bert", "sdpa"), ("t5", "eager"), ("vit", "eager")]
)
def test_before_and_after_are_what_runs(name, attention, tmp_path):
    model, inputs = family(name, attention, layers=1)
    reviewed(model.eval(), inputs, tmp_path)
    found = compared(tmp_path)
    assert max(max(row.old_error, row.new_error) for row in found) < 1e-5
    assert {"output", "gradient of v"} <= {row.name for row in found} or len(found) >= 4


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Stack(1) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class InPlace(Attention):
    """The mask is written into the scores; the first row of V is doubled in place."""

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * 0.25
        scores.masked_fill_(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf"))
        scores *= torch.tensor(2.0)
        v = v.clone()
        v[..., :1, :] *= 2
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


class Autocast(Stack):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Broken(Stack):
    """Two graphs: a break between the blocks."""

    def forward(self, x):
        x = self[0](x)
        torch._dynamo.graph_break()
        return self[1](x)


@pytest.mark.parametrize(
    ("model", "dynamic"), [(Checkpointed, None), (InPlace, True), (Autocast, None), (Broken, None), (Block, True)]
)
def test_children_changes_in_place_autocast_breaks_and_symbolic_sizes(model, dynamic, tmp_path):
    reviewed(model(), {"x": torch.randn(2, 6, 32)}, tmp_path, dynamic)
    limit = 2e-2 if model is Autocast else 1e-5
    assert max(max(row.old_error, row.new_error) for row in compared(tmp_path)) < limit


def test_dropout_is_left_out_of_a_comparison(tmp_path):
    precisionpass.explain(Stack(1, dropout=0.5), (torch.randn(2, 6, 32),)).save(tmp_path)
    (file,) = tmp_path.glob("repro_*.py")
    assert "0.5" in file.read_text()
    assert max(max(row.old_error, row.new_error) for row in rows(load(file))) < 1e-5


def test_the_files_run_alone(tmp_path):
    """As a reader would run them: a fresh interpreter in another folder, and the report they print."""
    precisionpass.explain(Stack(1).bfloat16(), (torch.randn(2, 6, 32).bfloat16(),)).save(tmp_path)
    (repro,) = tmp_path.glob("repro_*.py")
    for file, words in ((repro, "gradient of"), (tmp_path / "graph_0.after.py", "torch.bfloat16 [2, 6, 32]")):
        ran = subprocess.run([sys.executable, file.name], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert words in ran.stdout
    after = (tmp_path / "graph_0.after.py").read_text()
    assert "# bf16[2, 4, 6, 8]" in after
    assert "# 0.attention (Attention), tests/small_models.py:" in after and "torch.ops.precisionpass.attention" in after


def test_what_no_file_can_name_is_said(tmp_path):
    @torch.compiler.allow_in_graph
    def local(x):
        return x * 2

    precisionpass.explain(lambda x: local(x).softmax(-1), (torch.randn(3, 4),)).save(tmp_path)
    before = (tmp_path / "graph_0.before.py").read_text()
    assert "# It cannot be run: it calls test_what_no_file_can_name_is_said.<locals>.local" in before
    compile(before, "graph_0.before.py", "exec")


def test_a_model_without_weights_has_files_that_run(tmp_path):
    """What was looked at on the meta device: a site alone runs on the CPU, a graph gives shapes."""
    with torch.device("meta"):
        precisionpass.explain(Stack(1).bfloat16(), (torch.randn(2, 6, 32).bfloat16(),)).save(tmp_path)
    (repro,) = tmp_path.glob("repro_*.py")
    assert "meta" not in repro.read_text()
    assert max(row.new_error for row in rows(load(repro))) < 2e-2
    after = load(tmp_path / "graph_0.after.py")
    assert [(y.shape, y.is_meta) for y in after.graph(*after.inputs())] == [((2, 6, 32), True)]


def test_an_op_that_is_registered_elsewhere_is_named(tmp_path):
    @torch.library.custom_op("reviewed::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    precisionpass.explain(lambda x: twice(x).softmax(-1), (torch.randn(3, 4),)).save(tmp_path)
    text = (tmp_path / "graph_0.before.py").read_text()
    assert "# reviewed.twice.default is registered elsewhere: import its module first." in text
    assert load(tmp_path / "graph_0.before.py").graph(torch.zeros(3, 4))[0].tolist() == [[0.25] * 4] * 3


@pytest.mark.parametrize(
    "name",
    ["in_place", "divided_after_the_values", "exponentials", "sliding_window", "softcap", "sink_column", "alibi",
     "grouped_einsum", "a_mask_is_taken_away", "called_by_name_grouped"],
)  # fmt: skip
def test_a_site_alone_is_the_site_however_it_is_written(name, tmp_path):
    function, _, options = ATTENTION[name]
    torch._dynamo.reset()
    precisionpass.explain(function, tuple(tensors(**options))).save(tmp_path)
    found = compared(tmp_path)
    assert max(max(row.old_error, row.new_error) for row in found) < 1e-5
    assert len(found) >= 4
