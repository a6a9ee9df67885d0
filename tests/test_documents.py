"""Documents that run and documents that are built: the tour and the notebook print what they show, no link is dead.

`pytest tests/test_documents.py --update-golden` writes what they show anew.
"""

import ast
import contextlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.DOTALL)
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def said(code: str, names: dict, place: str) -> tuple[str, object]:
    """Run code as a notebook does: what it prints, and the value of its last line if that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, place, "exec"), names)
        value = eval(compile(ast.Expression(last.value), place, "eval"), names) if last is not None else None
    return printed.getvalue(), value


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_the_tour_prints_what_it_shows(request):
    page = ROOT / "docs" / "tour.md"
    text, names, shown = page.read_text(), {"__name__": "tour"}, []
    for code, expected in BLOCK.findall(text):
        shown.append((said(code, names, "tour.md")[0], expected))
    if request.config.getoption("--update-golden"):
        outputs = iter(shown)
        made = BLOCK.sub(lambda b: f"```python\n{b[1]}```\n" + _block(next(outputs)[0]), text)
        page.write_text(made)
        return
    assert [printed for printed, _ in shown] == [expected for _, expected in shown]


def _block(printed: str) -> str:
    return f"```text\n{printed}```\n" if printed else ""


def test_the_notebook_shows_what_its_cells_give(request, monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.syspath_prepend(str(NOTEBOOK.parent))
    notebook, names = json.loads(NOTEBOOK.read_text()), {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    stored = [cell["outputs"] for cell in cells]
    for number, cell in enumerate(cells, 1):
        printed, value = said("".join(cell["source"]), names, "notebook.ipynb")
        cell["outputs"] = _outputs(printed, value, number)
    if request.config.getoption("--update-golden"):
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        return
    assert [cell["outputs"] for cell in cells] == stored
    assert any("text/html" in output.get("data", {}) for outputs in stored for output in outputs)


def _outputs(printed: str, value: object, number: int) -> list[dict]:
    found: list[dict] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": str(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": value._repr_html_().splitlines(keepends=True), **data}
        found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


class Built(HTMLParser):
    """A page as a site generator builds it: where it leads, and what can be led to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.heading: str | None = None
        self.feed(MarkdownIt("commonmark").enable("table").render(page.read_text()))

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.heading = "" if re.fullmatch("h[1-6]", tag) else self.heading

    def handle_data(self, data):
        if self.heading is not None:
            self.heading += data

    def handle_endtag(self, tag):
        if re.fullmatch("h[1-6]", tag) and self.heading is not None:
            words = re.sub(r"[^\w\- ]", "", self.heading.lower())
            self.anchors.add(words.replace(" ", "-"))
            self.heading = None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_of_a_built_page_is_dead(page):
    dead = []
    for link in Built(page).links:
        file, _, anchor = link.partition("#")
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        target = page if not file else (page.parent / file).resolve()
        if not target.exists() or (anchor and anchor not in Built(target).anchors):
            dead.append(link)
    assert dead == []


def test_every_page_of_the_documentation_can_be_reached_from_the_readme():
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in Built(page).links if "//" not in link)
        pending += [(page.parent / link).resolve() for link in links if link]
    assert not set(PAGES) - reached


@pytest.mark.parametrize("name", ["bias.svg", "drift.svg"])
def test_the_plots_are_drawings_with_words(name):
    source = (ROOT / "docs" / name).read_text()
    assert source.startswith("<svg ") and "aria-label" in source and "prefers-color-scheme: dark" in source
    assert {"precisionpass", "flash-style", "all in BF16"} <= set(re.findall(r">([^<]+)</text>", source))
