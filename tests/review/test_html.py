import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from precisionpass.review.html import LONGEST_DIFF, page
from precisionpass.review.report import Call, Calls, Report
from tests.review import gpt2
from tests.review.test_text import HOSTILE

VOID = {"meta", "input", "link", "br", "hr", "img"}
SMALL_DIFF = "--- before\n+++ after\n q = linear(x)\n-p = softmax(s)\n+o = attention(q, k, v)\n"


class Document(HTMLParser):
    """The page as a browser's parser meets it: elements in order, their text, and whether every one is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def hostile_report() -> Report:
    site = replace(
        gpt2.attention(0),
        kind=HOSTILE, module=HOSTILE, module_class=HOSTILE, source=HOSTILE, graph=HOSTILE,
        decision=HOSTILE, rule=HOSTILE,
        reason=HOSTILE, message=HOSTILE, formula=HOSTILE, holds_while=HOSTILE, facts={HOSTILE: HOSTILE},
        settings={HOSTILE: {"value": HOSTILE, "rule": HOSTILE, "file": HOSTILE, "line": HOSTILE}},
        measured={HOSTILE: dict.fromkeys(("old_error", "new_error", "old_bias", "new_bias"), float("nan"))},
        calls=Calls(*[(Call(HOSTILE, HOSTILE, HOSTILE, (HOSTILE, "x"), HOSTILE, (HOSTILE,)),)] * 2, HOSTILE),
    )  # fmt: skip
    miss = replace(gpt2.near_miss(), kind=HOSTILE, module=HOSTILE, source=HOSTILE, reason=HOSTILE, message=HOSTILE)
    diff = {f"{HOSTILE}.diff": f"+{HOSTILE}\n-</pre></script>{HOSTILE}", "rules.resolved.yaml": HOSTILE}
    return Report((site, gpt2.attention(0)), (miss,), HOSTILE, HOSTILE, *((HOSTILE,),) * 3, graphs=2, artifacts=diff)


@pytest.mark.parametrize("report", [Report(), gpt2.report(), hostile_report()], ids=["empty", "gpt2", "hostile"])
def test_the_page_is_well_formed_and_asks_for_nothing(report):
    source = page(report)
    document = Document(source)
    assert [len(document.all(tag)) for tag in ("html", "title", "h1", "main", "header", "style", "script")] == [1] * 7
    assert document.all("html") == [{"lang": "en"}]
    assert not [element for element in document.elements if {"src", "href", "onclick", "style"} & set(element[1])]
    assert not document.all("link") and not document.all("base") and not document.all("img")
    assert "http://" not in source and "https://" not in source and "url(" not in source
    assert "default-src 'none'" in source
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = [attributes["aria-labelledby"] for attributes in document.all("section")]
    assert set(labelled) <= set(ids)


def test_the_page_says_what_the_text_says():
    artifacts = {"graph_0.diff": SMALL_DIFF, "rules.resolved.yaml": "- id: attention\n"}
    report = replace(gpt2.report(), failed_expectations=("attention: 13 sites",), artifacts=artifacts)
    document = Document(page(report))
    assert (
        document.text["h1"].replace("\u00a0", " ")
        == "12 attention sites rewritten, 25 layer_norm sites kept (already satisfied), 1 near miss."
    )
    everything = "".join(document.text.values())
    for words in (
        "transformer.h.{0-11}.attn", "transformer.h.7.attn", "softmax(0.125 q kᵀ where j ≤ i) v", "seq_q >= 2",
        "rules/stable-bf16.yaml:14", "stable-bf16:attention", "modeling_gpt2.py:64", "softmax_over_other_axis",
        "head.pool", "softcap", "compiled again: seq_q was 128, is 256",
        "attention: 13 sites", "+o = attention(q, k, v)", "never fired", "let the softmax run over the axis",
        "- id: attention", "o = attention(q, k, v)  # bf16[2, 4]", "python repro_0.attn.py",
    ):  # fmt: skip
        assert words in everything, words
    marked = [span["class"].split()[-1] for span in document.all("span") if (span["class"] or "").startswith("line ")]
    assert marked == ["same", "same", "same", "removed", "added"]
    assert [svg["aria-label"] for svg in document.all("svg")] == [
        "The calls of the attention site before", "The calls of the attention site after",
    ]  # fmt: skip


def test_expectations_that_hold_are_told():
    expecting = {"rules.resolved.yaml": "version: 1\nrules: []\nexpect:\n  - {sites: 3}\n"}
    held = "Every expectation of the rules holds."
    assert held in page(replace(gpt2.report(), artifacts=expecting))
    assert held not in page(gpt2.report())
    assert held not in page(replace(gpt2.report(), artifacts=expecting, failed_expectations=("3 sites",)))


def test_hostile_names_stay_text():
    source = page(hostile_report())
    document = Document(source)
    assert source.count("<script>") == 1
    assert all(line.isprintable() for line in source.replace("\u00a0", " ").splitlines())
    assert document.text["script"].startswith("// The page is whole without this")
    assert len(source) < 100_000


def test_only_the_pages_own_script_may_run():
    """The policy names the digest of exactly the text between the script tags."""
    source = page(gpt2.report())
    script = source[source.index("<script>") + len("<script>") : source.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source


def test_a_model_of_80_layers_and_many_nodes_stays_small():
    diff = "\n".join(
        f"+node_{n} = torch.ops.aten.mul(node_{n - 1}, node_{n - 2})  # model.layers.{n}" for n in range(9000)
    )
    source = page(replace(gpt2.report(layers=80), artifacts={"graph_0.diff": diff}))
    assert len(source.encode()) < 1_000_000
    assert f"{9000 - LONGEST_DIFF} more lines in the file itself" in source
    assert source.count("<svg") == 2
    assert source.count("<article") == 3


def test_every_fact_is_shown_even_where_it_is_false():
    assert re.search(r"<dt>sinks</dt><dd>no</dd>.*<dt>scale</dt><dd>0.125</dd>", page(gpt2.report()))
    assert '<div class="off"><dt>sinks</dt>' in page(gpt2.report())


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_text_colour_has_the_contrast_of_wcag_aa():
    """At least 4.5 : 1 on every background it stands on, light and dark."""
    for theme in re.findall(r"--paper:[^}]*", page(Report())):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme))
        for name in ("ink", "quiet", "rewritten", "refused", "kept", "miss", "link"):
            for ground in ("paper", "panel", "new-soft", f"{name}-soft" if f"{name}-soft" in colours else "paper"):
                dark, light = sorted((luminance(colours[name]), luminance(colours[ground])))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)
