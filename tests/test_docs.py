"""The documentation says what the code says: tables are generated, codes are complete, links lead somewhere.

`pytest tests/test_docs.py --update-golden` writes the generated tables anew.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from precisionpass.decide import MESSAGES
from precisionpass.hooks.figures import FIGURES, RECORDS
from precisionpass.rules import load
from precisionpass.rules.codes import CODES
from precisionpass.rules.facts import FACTS
from precisionpass.rules.groups import Escalate, GradClip, Hook, LogitClip, MatMul, RowMaxShift, Safer
from precisionpass.rules.model import Expect, Match, Rule, RulesFile
from precisionpass.rules.not_yet import NOT_YET_PRESETS, NOT_YET_PRODUCTS, NOT_YET_SETTINGS, NOT_YET_VALUES
from precisionpass.rules.settings import OPS, Apply, belongs_to
from precisionpass.sites.site import REASONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    escaped = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = [head, ["---"] * len(tuple(head)), *escaped]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def choices(model: type[BaseModel], name: str) -> str:
    """What may be written, from the model's JSON Schema, which is also what the loader checks."""
    part = model.model_json_schema(by_alias=True)["properties"][model.model_fields[name].alias or name]
    return written(part)


def written(part: dict) -> str:
    if "anyOf" in part:
        return ", or ".join(text for option in part["anyOf"] if (text := written(option)))
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "pattern" in part and part["pattern"].startswith("^own"):
        return "`own.NAME`"
    if "const" in part:
        return f"`{part['const']}`"
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return {"Match": "see below", "Apply": "see below", "Rule": "rules", "Expect": "see below"}.get(name, "a group")
    bounds = [f"{sign} {part[key]:g}" for key, sign in BOUNDS.items() if key in part]
    word = {"number": "number", "integer": "whole number", "boolean": "`true`, `false`", "string": "text"}
    if part.get("type") == "array":
        items = written(part["items"])
        return "a list" if items in ("see below", "rules", "") or "enum" in part["items"] else f"a list of {items}"
    return f"{word.get(part.get('type', ''), '')} {' and '.join(bounds)}".strip()


BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    if field.default is None:
        return "off" if model is Apply else ""
    return "" if field.default in ((), "") else f"`{str(field.default).lower()}`"


def fields(model: type[BaseModel]) -> list[list[str]]:
    return [
        [f"`{field.alias or name}`", choices(model, name), default(model, name), field.description or ""]
        for name, field in model.model_fields.items()
    ]


def kinds(ops: tuple[str, ...]) -> str:
    return "all" if set(ops) == set(OPS) else ", ".join(ops)


GROUPS = {
    "matmul": MatMul, "row_max_shift": RowMaxShift, "logit_clip": LogitClip, "grad_clip": GradClip,
    "escalate": Escalate, "escalate.to": Safer,
    "hooks": Hook,
}  # fmt: skip
KEYS = ("key", "what may be written", "default", "meaning")
TABLES = {
    "file": table(KEYS, fields(RulesFile)),
    "rule": table(KEYS, fields(Rule)),
    "match": table(KEYS, fields(Match)),
    "expect": table(KEYS, fields(Expect)),
    "facts": table(
        ("fact", "type", "sites", "meaning"),
        (
            [f"`{name}`", ", ".join(fact.words) or fact.type, kinds(fact.ops), fact.meaning]
            for name, fact in FACTS.items()
        ),
    ),
    "apply": table(
        ("setting", "what may be written", "default", "meaning", "sites"),
        ([*row, kinds(belongs_to(name))] for name, row in zip(Apply.model_fields, fields(Apply), strict=True)),
    ),
    "groups": "\n".join(
        f"`{name}`: {(group.__doc__ or '').strip().splitlines()[0]}\n\n{table(KEYS, fields(group))}"
        for name, group in GROUPS.items()
    ),
    "not_yet": table(
        ("setting or value", "what it will do, or what to write today"),
        [
            *([f"`{name}`", what] for name, what in NOT_YET_SETTINGS.items()),
            *([f"`matmul: {name}`", what] for name, what in NOT_YET_PRODUCTS.items()),
            *([f"`{name}: {value}`", what] for (name, value), what in NOT_YET_VALUES.items()),
            *([f"`extends: {name}`", why] for name, why in NOT_YET_PRESETS.items()),
        ],
    ),
    "codes": table(("code", "meaning"), CODES.items()),
    "records": table(("name", "what adds up"), ([f"`{name}`", meaning] for name, meaning in RECORDS.items())),
    "figures": table(
        ("figure", "recorded by", "meaning"),
        ([f"`{name}`", f"`{figure.record}`", figure.meaning] for name, figure in FIGURES.items()),
    ),
}  # fmt: skip

MONITORS = {"records", "figures"}


@pytest.mark.parametrize(("name", "tables"), [("writing-rules.md", set(TABLES) - MONITORS), ("monitors.md", MONITORS)])
def test_the_tables_are_those_of_the_code(name, tables, request):
    page = DOCS / name
    text = page.read_text()
    made = BLOCK.sub(lambda block: block[1] + TABLES[block[2]] + block[3], text)
    if request.config.getoption("--update-golden"):
        page.write_text(made)
    assert {block[1] for block in BLOCK.findall(text)} == tables
    assert page.read_text() == made, "run: pytest tests/test_docs.py --update-golden"


def test_everything_that_can_be_written_has_its_meaning():
    models = (Apply, Match, Rule, RulesFile, Expect, *GROUPS.values())
    assert not [row[0] for model in models for row in fields(model) if len(row[3]) < 10]


def test_the_questions_have_every_reason_code_in_the_words_of_the_review():
    page = (DOCS / "faq.md").read_text()
    answered = dict(re.findall(r"^### (\w+)\n> (.+)$", page, re.MULTILINE))
    assert answered == REASONS | MESSAGES


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in DOCS.glob("*.md"))])
def test_links_and_named_files_are_there(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    named = re.findall(r"\b(?:examples|benchmarks|docs|rules|tests)/[\w/.-]+\.\w+", text)
    missing = [name for name in links if not ((ROOT / page).parent / name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["monitors.md", "fp8.md"])
def test_rules_on_a_page_load_as_printed(page, tmp_path):
    """A whole file, or a rule to put into one."""
    found = 0
    for paragraph in (DOCS / page).read_text().split("\n\n"):
        text = textwrap.dedent(paragraph) + "\n"
        if paragraph.startswith(("    version:", "    rules:", "    - id:")):
            path = tmp_path / f"{found}.yaml"
            path.write_text("version: 1\nrules:\n" + text if text.startswith("- id:") else text)
            assert load(path).rules
            found += 1
    assert found
