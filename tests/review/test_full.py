from dataclasses import replace

from precisionpass.review.full import in_full
from precisionpass.review.report import Report
from tests.review import gpt2
from tests.review.test_html import hostile_report


def test_a_site_and_a_near_miss_in_full(golden):
    golden("gpt2.full.txt", replace(gpt2.report(layers=1), near_misses=(gpt2.near_miss(),)).full_text())


def test_a_site_without_calls_borrows_those_of_one_that_is_alike():
    found = gpt2.report().only(lambda module: module == "transformer.h.3.attn")
    assert [site.module for site in found.sites] == ["transformer.h.3.attn"]
    assert "o = attention(q, k, v)  # bf16[2, 4]" in found.full_text()
    assert found.near_misses == ()


def test_hostile_names_and_nothing_at_all():
    text = in_full(hostile_report())
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text) < 40_000
    assert in_full(Report()) == ""
