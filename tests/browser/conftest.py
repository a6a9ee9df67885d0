"""A headless Chromium, and pages of every sort. `make browser` installs what is needed; without it all is skipped."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import precisionpass
from precisionpass.review.compare import compare
from precisionpass.review.report import Report
from tests.review import gpt2
from tests.review.test_html import hostile_report
from tests.small_models import Stack

TOOLS = Path(os.environ.get("BROWSER_TOOLS", Path(__file__).parents[2] / ".browser")) / "node_modules"
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PAGES = ("gpt2", "model", "empty", "hostile", "diff", "large")


class Several(nn.Module):
    """Something of everything: two layers, a softmax that is no attention, a near miss, a norm."""

    def __init__(self):
        super().__init__()
        self.layers, self.gate, self.norm = Stack(2, dropout=0.1), nn.Linear(32, 32), nn.RMSNorm(32)

    def forward(self, x):
        x = self.layers(x)
        mixed = (x @ x.mT).softmax(-2) @ x
        return self.norm(x + mixed) * self.gate(x).softmax(-1)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> file of a page."""
    folder = tmp_path_factory.mktemp("pages")
    model = precisionpass.explain(Several().bfloat16(), (torch.randn(2, 8, 32).bfloat16(),))
    config = transformers.GPT2Config(attn_implementation="eager", use_cache=False)
    with torch.device("meta"):
        documented = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
        documented.loss_type, ids = "ForCausalLM", torch.zeros(4, 512, dtype=torch.long)
        gpt2_124m = precisionpass.explain(documented, (), {"input_ids": ids, "labels": ids})
    large = precisionpass.explain(Stack(80), (torch.randn(1, 4, 32),))
    reports = {
        "gpt2": gpt2.report(), "model": model, "empty": Report(), "hostile": hostile_report(), "large": large,
        "documented": gpt2_124m,
    }  # fmt: skip
    for name, report in reports.items():
        report.save(folder / name)
    files = {name: folder / name / "index.html" for name in (*PAGES, "documented")}
    files["diff"] = folder / "diff.html"
    files["diff"].write_text(compare(gpt2.report(), model).html(), encoding="utf-8")
    return files


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """A running Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make browser")
    if CHROMIUM is None:
        pytest.skip("no chromium on the path, and none named in CHROMIUM: apt-get install chromium")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, pages) -> Iterator[Callable]:
    """opened(name, **options): the page, open. At the end nothing may have gone to the console or the network."""
    contexts, said = [], []

    def open_page(name: str, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 1000}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda asked: said.append(f"request: {asked.url}"))
        page.goto(pages[name].as_uri())
        assert said.pop(0) == f"request: {pages[name].as_uri()}"
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
