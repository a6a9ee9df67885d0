from dataclasses import replace

import pytest

from precisionpass.review.plain import shown
from precisionpass.review.report import Report
from precisionpass.review.text import GROUPS_SHOWN, table, verdict, why_not
from tests.review import gpt2

HOSTILE = "a\nb\"'<script>\x1b[31m\u202egnp.exe\x00" + "x" * 10_000 + "\ud800"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_gpt2_is_one_screen(golden, width):
    shown_table = gpt2.report().text(width)
    assert len(shown_table.splitlines()) <= 30
    assert max(map(len, shown_table.splitlines())) <= width
    golden(f"gpt2.{width}.txt", shown_table)


def test_the_table_does_not_grow_with_the_layers():
    assert len(gpt2.report(layers=80).text().splitlines()) == len(gpt2.report(layers=12).text().splitlines())


def test_print_shows_the_table(capsys):
    print(gpt2.report())
    assert capsys.readouterr().out == gpt2.report().text() + "\n"


def test_why_not_names_every_kept_site_and_near_miss(golden):
    golden("gpt2.why_not.txt", why_not(gpt2.report()))


def test_the_verdict_counts_what_was_refused_before_what_was_kept():
    refused = replace(gpt2.attention(0), decision="refused", reason="mutated_between")
    sites = (gpt2.layer_norm("ln", 1), refused, gpt2.attention(1))
    assert verdict(Report(sites=sites)) == (
        "1 attention site rewritten, 1 attention site refused (mutated between), "
        "1 layer_norm site kept (already satisfied)."
    )


def test_a_site_that_a_rule_asked_for_and_that_was_refused_names_its_reason_code():
    refused = replace(gpt2.attention(0), decision="refused", reason="mutated_between", message="v is written in place")
    assert "why: v is written in place (mutated_between)" in Report(sites=(refused,)).text()


def test_a_failed_expectation_stands_under_the_verdict():
    report = replace(gpt2.report(), failed_expectations=("attention: 13 sites rewritten, found 12",))
    assert report.text().splitlines()[2] == "EXPECTATION FAILED: attention: 13 sites rewritten, found 12"


def test_nothing_found_says_so():
    assert Report().text().startswith("No site was found: the model runs as it is.")
    assert verdict(Report(near_misses=(gpt2.near_miss(),) * 2)) == (
        "No site was found, 2 near misses: the model runs as it is."
    )
    assert why_not(Report()) == "No site was found, and nothing was almost a site.\n"
    assert why_not(Report(sites=(gpt2.attention(0),))).startswith("Every site that was found was rewritten")


def test_settings_of_several_rules_name_each_rule_and_line():
    settings = {
        "dead_rows": {"value": "nan", "rule": "rows", "file": "a/b.yaml", "line": 3},
        "softcap": {"value": 50.0, "rule": "cap", "file": "", "line": 0},
        "normaliser": {"value": "rounded", "rule": "rows", "file": "a/b.yaml", "line": 4},
    }
    text = Report(sites=(replace(gpt2.attention(0), settings=settings),)).text()
    assert "set: dead_rows=nan, normaliser=rounded (rows, b.yaml:3,4); softcap=50 (cap)" in text


def test_sites_of_several_graphs_name_their_graphs():
    sites = tuple(replace(gpt2.attention(i), graph=str(i)) for i in range(4))
    assert "at modeling_gpt2.py:64 (graph {0-3})" in Report(sites=sites, graphs=4).text()


def test_what_the_screen_leaves_out_is_counted():
    sites = tuple(replace(gpt2.attention(0), facts={"heads": heads}) for heads in range(GROUPS_SHOWN + 7))
    misses = tuple(replace(gpt2.near_miss(), message=f"{n}") for n in range(GROUPS_SHOWN + 5))
    text = Report(sites=sites, near_misses=misses).text()
    assert "... and 7 more; report.save(folder) writes all of them to sites.jsonl" in text
    assert "... and 5 more; report.save(folder) writes all of them to why_not.txt" in text


@pytest.mark.parametrize("width", [80, 160])
def test_hostile_names_cannot_break_the_table(width):
    site = replace(
        gpt2.attention(0),
        kind=HOSTILE, module=HOSTILE, module_class=HOSTILE, source=HOSTILE, graph=HOSTILE, rule=HOSTILE, reason=HOSTILE,
        message=HOSTILE, formula=HOSTILE, holds_while=HOSTILE, facts={HOSTILE: HOSTILE, "dtype": HOSTILE},
        settings={HOSTILE: {"value": HOSTILE, "rule": HOSTILE, "file": HOSTILE, "line": 1}},
    )  # fmt: skip
    miss = replace(
        gpt2.near_miss(),
        kind=HOSTILE,
        module=HOSTILE,
        module_class=HOSTILE,
        source=HOSTILE,
        reason=HOSTILE,
        message=HOSTILE,
    )
    report = Report((site,), (miss,), HOSTILE, HOSTILE, (HOSTILE,), (HOSTILE,), (HOSTILE,), graphs=2)
    for text in (table(report, width), why_not(report, width)):
        assert all(line.isprintable() for line in text.splitlines())
        assert max(map(len, text.splitlines())) <= width
        assert len(text) < 20_000


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("h.0.attn", "h.0.attn"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202eabc", "\\u202eabc"),
        ("\x1b[0m", "\\x1b[0m"),
        ("\ud800", "\\ud800"),
        ("日本", "日本"),
        ("x" * 40, "x" * 40),
        ("x" * 31 + "0123456789", "xxxxxxxxxxxxxxx...(41 characters)...6789"),
    ],
)
def test_names_are_shown_as_one_printable_line(text, line):
    assert shown(text, limit=40) == line
