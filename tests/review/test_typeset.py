import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precisionpass.review.typeset import mathml
from tests.sites.spellings import ATTENTION


def read(formula: str) -> str:
    """What a reader sees, signs one after the other."""
    return "".join(ElementTree.fromstring(mathml(formula)).itertext())


@pytest.mark.parametrize(
    ("formula", "seen"),
    [
        ("softmax(QK^T * 0.125, j <= i) V", "softmaxj≤i(QKT·0.125)V"),
        ("dropout(softmax(QK^T * 0.125, j <= i, j >= i - 5), 0.1) V", "dropout0.1(softmaxj≤i,j≥i−5(QKT·0.125))V"),
        (
            "softmax(50 * tanh(QK^T / 50) + bias[h,i,j], sink s) V * gate",
            "softmaxsinks(50·tanh(QKT50)+biash,i,j)V·gate",
        ),
        ("where(mask[b,i,j], QK^T, -inf)", "where(maskb,i,j,QKT,−inf)"),
        ("(x - mean(x)) / sqrt(var(x) + 1e-05) * w + b", "x−mean(x)var(x)+10−5·w+b"),
        ("(x) / sqrt(mean(x^2) + 2.5e-06) * (1 + w)", "xmean(x2)+2.5·10−6·(1+w)"),
        ("log_softmax(x, dim=-1)", "log_softmaxdim=−1(x)"),
    ],
)
def test_formulas_are_typeset(formula, seen):
    assert read(formula) == seen
    assert f'alttext="{formula.replace("<", "&lt;").replace(">", "&gt;")}"' in mathml(formula)


def test_quotients_have_a_line_and_roots_a_sign():
    source = mathml("(a + b) / sqrt(c)")
    assert "<mfrac><mrow><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow></mrow><mrow><msqrt>" in source
    assert "(" not in re.sub(r'alttext="[^"]*"', "", source)


@pytest.mark.parametrize(
    "formula", ["", "softmax(", "a b)", "a + ", "x ^ y", "<script>", "q kᵀ ∘ v", "a..b", "((" * 900, "a" * 5000]
)
def test_what_is_no_formula_is_left_as_it_is(formula):
    assert mathml(formula) == ""


@given(st.text(alphabet="QKTVx()[]+-*/^,<=> 0123456789.e_'\"&", max_size=60))
def test_any_text_gives_well_formed_markup_or_nothing(formula):
    source = mathml(formula)
    assert source == "" or ElementTree.fromstring(source).tag == "math"


@pytest.mark.parametrize("formula", sorted({formula for _, formula, _ in ATTENTION.values()}))
def test_the_formula_of_every_spelling_is_typeset(formula):
    assert read(formula)
