"""Two reviews held against each other, as text, as a page, and by exit status."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from precisionpass import PrecisionPassError, cli
from precisionpass.review.compare import compare
from precisionpass.review.load import load_review
from precisionpass.review.report import Report
from tests.review import gpt2
from tests.review.test_html import Document, hostile_report
from tests.review.test_text import HOSTILE


def with_sites(change) -> Report:
    """GPT-2's report with its attention sites changed."""
    sites = tuple(change(site) if site.kind == "attention" else site for site in gpt2.report().sites)
    return replace(gpt2.report(), sites=sites)


def kept(site):
    settings = {"implementation": {"value": "keep", "rule": "mine", "file": "own.yaml", "line": 3}}
    return replace(site, decision="kept", reason="rule_keeps", rule="mine", settings=settings)


def test_a_review_is_itself():
    comparison = compare(gpt2.report(), gpt2.report())
    assert not comparison.differs
    assert comparison.text() == "The two reviews say the same.\n"


def test_what_changed_is_folded_and_counted_by_rule(golden):
    now = replace(with_sites(kept), rules_name="own", rules_digest="77", near_misses=(), events=("recompiled",))
    before = replace(gpt2.report(), artifacts={"rules.resolved.yaml": "a: 1\nb: 2\n", "graph_0.after.py": "x\ny\n"})
    now = replace(now, artifacts={"rules.resolved.yaml": "a: 1\nb: 3\n", "graph_0.after.py": "x\n"})
    comparison = compare(before, now)
    assert comparison.differs
    golden("diff.txt", comparison.text())


@pytest.mark.parametrize(
    ("now", "how", "said"),
    [
        (replace(gpt2.report(), sites=gpt2.report().sites[1:]), "removed", "layer_norm x 1  removed"),
        (replace(gpt2.report(), sites=(*gpt2.report().sites, gpt2.attention(40))), "added", "transformer.h.40.attn"),
        (with_sites(lambda s: replace(s, facts={**s.facts, "heads": 8})), "changed", "heads: 12 -> 8"),
        (with_sites(lambda s: replace(s, formula="softmax(q kᵀ) v")), "changed", "formula: softmax(0.125 q kᵀ"),
        (with_sites(lambda s: replace(s, holds_while="")), "changed", "holds_while: seq_q >= 2 -> (nothing)"),
        (replace(gpt2.report(), near_misses=(gpt2.near_miss(), gpt2.near_miss("x"))), "added", "attention (near miss)"),
    ],
)  # fmt: skip
def test_every_difference_is_told(now, how, said):
    comparison = compare(gpt2.report(), now)
    assert comparison.differs
    assert {site.how for site in comparison.sites} == {how}
    assert said in comparison.text()


def test_lines_that_moved_are_told_and_do_not_count():
    def moved(site):
        settings = {name: {**held, "line": 99} for name, held in site.settings.items()}
        return replace(site, source="modeling_gpt2.py:70", settings=settings)

    comparison = compare(gpt2.report(), with_sites(moved))
    assert not comparison.differs
    assert comparison.verdict == "The two reviews say the same (12 sites moved)."
    assert "source: modeling_gpt2.py:64 -> modeling_gpt2.py:70" in comparison.text()


def test_the_page_of_a_comparison_is_well_formed_and_escaped():
    comparison = compare(gpt2.report(), hostile_report())
    source = comparison.html()
    document = Document(source)
    assert "default-src 'none'" in source and not document.all("script")
    assert all(line.isprintable() for line in (source + comparison.text()).splitlines())
    assert document.text["h1"].startswith("1 near miss added, 1 site added, 1 near miss removed, 36 sites removed")


def test_reviews_are_read_back(tmp_path):
    gpt2.report().save(tmp_path)
    assert load_review(tmp_path) == load_review(tmp_path / "report.json") == gpt2.report()
    assert load_review(tmp_path).artifacts == {"graph_0.after.py": "# after\n", "graph_0.before.py": "# before\n"}
    hostile = hostile_report()
    hostile.save(tmp_path / "hostile")
    assert load_review(tmp_path / "hostile").to_json() == hostile.to_json()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not JSON"),
        ("[]", "not a report"),
        ('{"schema_version": 99}', "its schema_version is 99, and this version reads 1"),
        ('{"schema_version": 1, "sites": 3}', "does not hold what a report holds"),
        ('{"schema_version": 1, "sites": [{}], "near_misses": []}', "a record without decision"),
        ("[" * 100_000, "not JSON"),
        (json.dumps({"schema_version": HOSTILE}), "its schema_version is a\\nb"),
    ],
)
def test_what_is_no_review_is_refused(tmp_path, content, why):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(PrecisionPassError) as caught:
        load_review(tmp_path)
    assert str(caught.value).startswith("PP302 this is no review that can be read")
    assert why in str(caught.value) and "fix: give a folder that precisionpass wrote" in str(caught.value)


@pytest.mark.parametrize("name", ["kind", "facts", "settings", "count"])
def test_a_field_of_the_wrong_type_is_refused(tmp_path, name):
    content = json.loads(gpt2.report(layers=1).to_json())
    content["sites"][0][name] = [1]
    (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(PrecisionPassError, match=name):
        load_review(tmp_path)


def test_the_command_line(tmp_path, capsys):
    a, b, page = tmp_path / "a", tmp_path / "b", tmp_path / "pages" / "diff.html"
    gpt2.report().save(a)
    with_sites(kept).save(b)
    assert cli.main(["diff", str(a), str(a)]) == 0
    assert cli.main(["diff", str(a), str(b), "--html", str(page)]) == 1
    out, err = capsys.readouterr()
    assert "attention x 12  changed  transformer.h.{0-11}.attn" in out
    assert err == f"page written to {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert cli.main(["diff", str(a), str(tmp_path / "no")]) == 2
    assert "PP302" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["diff", str(a), str(b), "--html", str(tmp_path / "file" / "x.html")]) == 2
    assert "PP301" in capsys.readouterr().err


def test_a_comparison_needs_no_torch():
    code = "import sys; from precisionpass.review import compare, load; print({'torch', 'rich'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.stdout == "set()\n"
