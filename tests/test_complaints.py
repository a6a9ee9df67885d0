"""on_refused, on_unmatched and on_unexpected: warned of, raised bare, or passed over, as the rules file says."""

import re
from pathlib import Path

import pytest
import torch

import precisionpass
from precisionpass import PrecisionPassError
from precisionpass.rules.codes import CODES
from tests.small_models import Attention, Stack

RULES = """
version: 1
KEY: WAY
rules:
- {id: all, match: {op: attention}, apply: {implementation: auto, probabilities: never}}
MORE
"""
GONE = "- {id: gone, match: {op: attention, module: no.such}, apply: {implementation: auto}}"
EXPECT = "expect: [{op: attention, sites: 3}]"
CASES = {
    "on_refused": ("", "PP402", "1 site(s) that a rule matches cannot be rewritten"),
    "on_unmatched": (GONE, "PP406", "no site is matched by gone"),
    "on_unexpected": (EXPECT, "PP409", "the model has other sites than the rules expect: expected 3 attention sites, "
                      "found 1"),
}  # fmt: skip


class Shown(Attention):
    """Returns its probabilities too."""

    def forward(self, x):
        q, k, v = (x.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for _ in range(3))
        probabilities = (q @ k.mT).softmax(-1)
        return probabilities @ v, probabilities


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def rules(tmp_path):
    def write(key, way):
        text = RULES.replace("KEY", key).replace("WAY", way).replace("MORE", CASES[key][0])
        (tmp_path / "r.yaml").write_text(text)
        return tmp_path / "r.yaml"

    return write


def model_for(key):
    return Shown() if key == "on_refused" else Attention()


@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("kind", ["module", "function"])
def test_an_error_of_the_rules_comes_bare_out_of_the_call(rules, key, kind):
    model, (_, code, message) = model_for(key), CASES[key]
    call = model if kind == "module" else lambda x: model(x)
    compiled = precisionpass.compile(call, rules=rules(key, "error"), backend="eager")
    with pytest.raises(PrecisionPassError) as raised:
        compiled(torch.randn(2, 5, 32))
    assert type(raised.value) is PrecisionPassError
    assert str(raised.value).splitlines()[0] == f"{code} {message}"
    assert raised.value.fix and raised.value.why and code in CODES


@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("way", ["warn", "keep"])
def test_a_warning_or_nothing(rules, key, way, caplog):
    compiled = precisionpass.compile(model_for(key), rules=rules(key, way), backend="eager")
    for length in (5, 5, 6):
        compiled(torch.randn(2, length, 32))
    # What is refused is said of every graph; what concerns the whole model, once.
    assert caplog.text.count(CASES[key][2]) == {"keep": 0, "warn": 2 if key == "on_refused" else 1}[way]


def test_explain_says_it_too(rules, caplog):
    x = torch.randn(2, 5, 32)
    for key in ("on_refused", "on_unmatched"):
        with pytest.raises(PrecisionPassError, match=re.escape(CASES[key][2])):
            precisionpass.explain(model_for(key), (x,), rules=rules(key, "error"))
    report = precisionpass.explain(Attention(), (x,), rules=rules("on_unmatched", "warn"))
    assert report.unused_rules == ("gone",)
    assert "no site is matched by gone" in caplog.text
    # An expectation is the report's to tell: the command line ends with status 1.
    report = precisionpass.explain(Attention(), (x,), rules=rules("on_unexpected", "error"))
    assert report.failed_expectations == ("expected 3 attention sites, found 1",)


def test_all_graphs_of_the_first_call_count():
    """The rules are held against what the whole call captured, not against its first graph."""

    class Broken(Stack):
        def forward(self, x):
            for block in self:
                torch._dynamo.graph_break()
                x = block(x)
            return x

    rules = precisionpass.Rule(id="last", match={"op": "attention", "module": "1.**"}, apply={"delta": "output"})
    compiled = precisionpass.compile(Broken(2), rules=[rules], backend="eager")
    compiled(torch.randn(2, 5, 32))
    assert precisionpass.report(compiled).unused_rules == ()


def test_an_error_of_the_inner_backend_stays_torchs():
    def broken(module, inputs):
        raise KeyError("mine")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        precisionpass.compile(Attention(), backend=broken)(torch.randn(2, 5, 32))
    assert isinstance(raised.value.inner_exception, KeyError)


def test_inside_another_compilation():
    inner = precisionpass.compile(Attention(), backend="eager")
    x = torch.randn(2, 5, 32)
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager")
    assert torch.allclose(outer(x), inner(x) + 1, atol=1e-5)


def test_every_code_is_listed():
    sources = Path(precisionpass.__file__).parent.rglob("*.py")
    used = {code for file in sources for code in re.findall(r'"(PP\d{3})"', file.read_text())}
    assert used == set(CODES)
