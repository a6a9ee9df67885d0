"""Figures against float64 in a review: of the sites, when asked for."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import precisionpass
from precisionpass import cli
from precisionpass.measure import compare
from precisionpass.review.compare import compare as held_against
from precisionpass.review.html import page
from precisionpass.review.load import load_review
from precisionpass.review.measured import with_measures
from tests.small_models import Stack


@pytest.fixture(scope="module")
def report():
    torch._dynamo.reset()
    return precisionpass.explain(Stack(2).bfloat16(), (torch.randn(2, 12, 32).bfloat16(),), measure=True)


def test_every_rewritten_site_has_its_figures_and_no_other(report):
    attention = [site for site in report.sites if site.kind == "attention"]
    assert [set(site.measured) for site in attention] == [
        {"output", "gradient of q", "gradient of k", "gradient of v"}
    ] * 2
    assert attention[0].measured == attention[1].measured
    for figures in attention[0].measured.values():
        assert 1e-4 < figures["new_error"] <= 1.1 * figures["old_error"] < 2e-2
        assert abs(figures["new_bias"]) < figures["new_error"]
    assert [dict(site.measured) for site in report.sites if site.kind != "attention"] == [{}, {}]


def test_the_figures_stand_in_every_form_of_the_review(report):
    error = "{old_error:.1e} -> {new_error:.1e}".format(**report.sites[1].measured["output"])
    assert f"error against float64: output {error}, gradients " in report.text()
    assert f"output  {error}  " in report.full_text()
    assert "Against float64, on made-up values" in page(report) and error.split(" -> ")[1] in page(report)
    assert '"new_bias"' in report.to_json()


def test_the_same_figures_twice(report):
    assert with_measures(report) == report


def test_figures_are_read_back_and_compared(report, tmp_path):
    report.save(tmp_path)
    assert load_review(tmp_path) == report
    other = replace(report, sites=tuple(replace(site, measured={}) for site in report.sites))
    assert "gradient of q: " in held_against(report, other).text()
    content = json.loads(report.to_json())
    content["sites"][1]["measured"]["output"]["new_bias"] = "<b>"
    (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(precisionpass.PrecisionPassError, match="could not convert"):
        load_review(tmp_path)


def test_nothing_is_measured_unasked(report):
    assert not any(site.measured for site in precisionpass.explain(Stack(1), (torch.randn(2, 6, 32),)).sites)
    assert "float64" not in replace(report, sites=tuple(replace(s, measured={}) for s in report.sites)).text()


def test_a_site_that_cannot_be_measured_is_an_event(report):
    broken = {name: text.replace("def new(", "def lost(") for name, text in report.artifacts.items()}
    found = with_measures(replace(report, artifacts=broken))
    assert found.events[-1].endswith("could not be measured: KeyError")
    assert not any(site.measured for site in found.sites)


def test_an_exact_site_has_no_error_and_a_wrong_one_its_whole():
    x = {"x": torch.randn(64, 8)}
    (output, gradient) = compare(lambda x: x * 2, lambda x: x * 2, x)
    assert (output.name, output.new_error, gradient.name, gradient.new_error) == ("output", 0.0, "gradient of x", 0.0)
    output, gradient = compare(lambda x: x.abs(), lambda x: x.abs() * 1.5, x)
    assert output.old_error == 0.0
    assert output.new_error == pytest.approx(0.5) == output.new_bias
    assert gradient.new_error == pytest.approx(0.5)


def test_measuring_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "measured_model.py").write_text(
        "import torch\nfrom tests.small_models import Block\n"
        "def make():\n    return Block().bfloat16(), (torch.randn(2, 6, 32).bfloat16(),)\n"
    )
    torch._dynamo.reset()
    assert cli.main(["explain", "measured_model.py:make", "--rules", "stable-bf16", "--measure"]) == 0
    assert "error against float64: output" in capsys.readouterr().out
