"""Names that a person may give modules, in every file of a review: they stay text, and the code stays code."""

import ast

import torch
from torch import nn

import precisionpass
from precisionpass.review.plain import shown
from tests.review.test_code import compared
from tests.review.test_html import Document
from tests.small_models import Block

NAMES = [
    '"""\nimport os  # </script><script>alert(1)</script>',
    "\u202egnp'\x00\\",
    "x" * 10_000,
    "日本 {{ 7 * 7 }} {% x %}",
]


class Hostile(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: Block() for name in NAMES})

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x


def test_hostile_module_names_are_text_in_every_file(tmp_path):
    report = precisionpass.explain(Hostile(), (torch.randn(2, 6, 32),))
    assert [site.module for site in report.sites if site.kind == "attention"] == [f"parts.{n}.attention" for n in NAMES]
    report.save(tmp_path)
    for file in tmp_path.iterdir():
        assert file.name.isascii() and len(file.name) <= 130
        text = file.read_text()
        lines = text.replace("\u00a0", " ").splitlines()
        assert all(line.isprintable() for line in lines), file.name
        assert len(text) < 400_000
        if file.suffix == ".py":
            called = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
            assert "os" not in called and "alert" not in called
    assert max(max(row.old_error, row.new_error) for row in compared(tmp_path)) < 1e-5
    page = (tmp_path / "index.html").read_text()
    assert page.count("<script>") == 1 and "{{ 7 * 7 }}" in "".join(Document(page).text.values())
    assert all(shown(f"parts.{name}.attention") in "".join(Document(page).text.values()) for name in NAMES)


def test_the_review_of_an_exported_program_runs_too(tmp_path):
    x = torch.randn(2, 6, 32)
    program = torch.export.export(Block().eval(), (x,))
    rewritten = precisionpass.rewrite(program, review=tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    assert {"graph_0.before.py", "graph_0.after.py", "rules.resolved.yaml", "index.html"} <= files
    for file in tmp_path.glob("*.py"):
        compile(file.read_text(), file.name, "exec")
    assert "torch.ops.precisionpass.attention" in (tmp_path / "graph_0.after.py").read_text()
    assert max(max(row.old_error, row.new_error) for row in compared(tmp_path)) < 1e-5
    torch.testing.assert_close(rewritten.module()(x), program.module()(x))
