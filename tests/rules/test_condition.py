"""The where language: what it means, what it refuses, and that symbols pass through it unasked."""

import operator
from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precisionpass.rules.condition import MissingFact, parse
from precisionpass.rules.condition_tree import ConditionError

FACTS = {
    "dtype": "bf16", "statistics": "torch.float32", "seq_q": 1024, "seq_k": 2048, "heads": 12, "kv_heads": 4,
    "head_dim": 64, "causal": True, "masked": False, "dropout": 0.1, "softcap": 0.0, "training": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dtype == bf16 and seq_q >= 1024 and head_dim <= 128 and not causal", False),
        ("dtype == 'bf16' or causal", True),
        ("dtype == bfloat16", True),
        ("bf16 == dtype", True),
        ("dtype != fp32", True),
        ("statistics == fp32", True),
        ("dtype in (bf16, fp16)", True),
        ("dtype not in [bf16, fp16]", False),
        ("head_dim in (64, 128)", True),
        ("512 <= seq_q < 1024", False),
        ("512 <= seq_q <= seq_k", True),
        ("seq_q != seq_k", True),
        ("heads // 3 * kv_heads + 1 - 1 == 16", True),
        ("seq_q % 1024 == 0", True),
        ("-seq_q < +0", True),
        ("dropout > 0.05 and softcap == 0", True),
        ("causal and not masked", True),
        ("causal == true and masked == False", True),
        ("not (causal or masked)", False),
        ("not not causal", True),
        ("(((causal)))", True),
        ("  causal\n  and\tseq_q > 1  ", True),
    ],
)
def test_meaning(text, value):
    condition = parse(text)
    assert condition.text == text
    assert condition.evaluate(FACTS) is value


def test_names_and_equality():
    assert parse("seq_q>1 and not causal").names == ("causal", "seq_q")
    assert parse("seq_q>1") == parse(" seq_q  >  1") != parse("seq_q > 2")
    assert len({parse("seq_q>1"), parse("seq_q > 1")}) == 1


def test_a_site_without_the_fact_is_not_matched_even_under_not():
    with pytest.raises(MissingFact, match="width"):
        parse("not width > 3").evaluate(FACTS)
    assert parse("width > 3 or causal").missing(FACTS) == ("width",)
    assert parse("window == 0").missing({"window": None}) == ("window",)


class Symbol:
    """Records how it was computed and refuses to be asked whether it is true."""

    def __init__(self, text):
        self.text = text

    def __bool__(self):
        raise AssertionError(f"{self.text} was asked for its truth")

    def _with(sign):
        return lambda self, other: Symbol(f"({self.text} {sign} {getattr(other, 'text', other)})")

    __add__, __mul__, __floordiv__, __mod__ = _with("+"), _with("*"), _with("//"), _with("%")
    __lt__, __le__, __gt__, __ge__ = _with("<"), _with("<="), _with(">"), _with(">=")
    __eq__, __ne__, __and__, __or__ = _with("=="), _with("!="), _with("&"), _with("|")
    __rmul__, __rand__, __hash__ = __mul__, __and__, None


def test_symbols_give_one_symbol_and_are_never_asked():
    facts = FACTS | {"seq_q": Symbol("s0"), "seq_k": Symbol("s1")}
    condition = parse("dtype == bf16 and not (128 <= seq_q <= 4 * seq_k or seq_q % 64 != 0) and causal")
    whole = condition.evaluate(facts, not_=lambda value: Symbol(f"~{value.text}"))
    assert whole.text == "((~(((s0 >= 128) & (s0 <= (s1 * 4))) | ((s0 % 64) != 0)) & True) & True)"


def test_the_caller_says_what_and_or_not_are():
    Call = namedtuple("Call", "name values")
    condition = parse("causal and masked or not training")
    value = condition.evaluate(
        {"causal": 1, "masked": 2, "training": 3},
        and_=lambda *v: Call("and", v), or_=lambda *v: Call("or", v), not_=lambda *v: Call("not", v),
    )  # fmt: skip
    assert value == Call("or", (Call("and", (1, 2)), Call("not", (3,))))


@pytest.mark.parametrize(
    ("text", "message", "offset"),
    [
        ("dtyp == bf16", 'unknown fact "dtyp"; did you mean "dtype"?', 0),
        ("causul", 'unknown fact "causul"; did you mean "causal"?', 0),
        ("causal and seqq > 1", 'unknown fact "seqq"; did you mean "seq_q"?', 11),
        ("seq_q + hedas > 1", 'unknown fact "hedas"; did you mean "heads"?', 8),
        ("dtype == bf61", '"bf61" is no dtype; did you mean "bf16"?', 9),
        ("device == hopper", '"hopper" is no device; choose "cpu", "cuda", "meta", "mps" or "xpu"', 10),
        ("dtype in (bf16, int8)", '"int8" is no dtype; choose "bf16", "fp16", "fp32" or "fp64"', 16),
        ("seq_q", '"seq_q" is not true or false; compare it, as in seq_q > 0', 0),
        ("not dtype", '"dtype" is not true or false; compare it, as in dtype == bf16', 4),
        ("dtype < bf16", "dtype has no order; write == or !=", 0),
        ("dtype == seq_q", "dtype and seq_q cannot be compared", 0),
        ("causal > 3", "causal and 3 cannot be compared", 0),
        ("seq_q in 3", "after in, write the choices in parentheses, as in dtype in (bf16, fp16)", 9),
        ("seq_q in ()", "after in, write the choices in parentheses, as in dtype in (bf16, fp16)", 9),
        ("dtype is bf16", "write == instead of is", 9),
        ("eps * 2 > 1", "eps is not a whole number, so there is no * on it", 0),
        ("seq_q % heads == 0", "on the right of % there must be a whole number above 0", 8),
        ("seq_q // 0 == 0", "on the right of // there must be a whole number above 0", 9),
        ("seq_q ** 2 > 3", "powers are not part of a condition; write the number out", 0),
        ("seq_q / 2 > 3", "/ is not part of a condition; write // for whole numbers", 0),
        ("seq_q << 2 > 3", "the arithmetic of a condition is + - * // %", 0),
        ("open('x') == 3", "calls are not part of a condition", 0),
        ("dtype.name == bf16", "dots are not part of a condition", 0),
        ("seq_q[0] == 3", "brackets after a name are not part of a condition", 0),
        ("causal if masked else causal", "if and else are not part of a condition", 0),
        ("f'{x}' == dtype", "'{' has no meaning in a condition", 2),
        ("(x := 3)", "':' has no meaning in a condition", 3),
        ("seq_q > 3 # why", "'#' has no meaning in a condition", 10),
        ("seq_q > é", "'é' has no meaning in a condition", 8),
        ("seq_q > 1 and", "the condition cannot be read here", 12),
        ("seq_q > > 1", "the condition cannot be read here", 8),
        ("causal) or (causal", "the condition cannot be read here", 6),
        ("b'x' == dtype", "this is not part of a condition", 0),
        ("(causal == masked) == causal", "only facts and numbers can be compared; join truths with and, or, not", 1),
        ("1 < 2", "the condition asks nothing about the site", 0),
        ("true", "the condition asks nothing about the site", 0),
        ("", "the condition is empty", 0),
        ("seq_q > 9999999999999999999999", "this number is too large", 8),
        ("eps > 1e999", "this number is too large", 6),
        (" and ".join(["seq_q > 1"] * 10_000), "the condition has 139995 characters; the limit is 2000", 0),
        ("not " * 400 + "causal", "the condition nests deeper than 24 levels", 0),
        ("(" * 90 + "causal" + ")" * 90 + "-" * 300, "the condition cannot be read here", None),
        ("1+" * 300 + "1 > seq_q", "the condition has too many terms; write several rules", None),
        ("causal or " * 150 + "causal", None, None),
    ],
)
def test_refusals(text, message, offset):
    if message is None:
        assert parse(text).names == ("causal",)
        return
    with pytest.raises(ConditionError) as raised:
        parse(text)
    if offset is not None:
        assert (raised.value.message, raised.value.offset) == (message, offset)
    assert raised.value.offset < max(1, len(text))


def test_a_large_chain_does_not_grow_the_tree():
    sides = " < ".join(["seq_q + seq_k + heads"] * 20)
    assert str(parse(sides).tree).count("fact") < 130


terms = st.sampled_from(["seq_q > 1", "causal", "dtype == bf16", "head_dim // 3 == 21", "masked", "dropout < 0.05"])
texts = st.recursive(
    terms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda t: f"not ({t})"),
    ),
    max_leaves=8,
)


@given(texts)
def test_conditions_mean_what_python_means(text):
    names = {**FACTS, "bf16": "bf16"}
    assert parse(text).evaluate(FACTS) is eval(text, {"__builtins__": {}}, names)


@given(st.text(max_size=60) | st.text("adeqstyp_ ()<>=!+-*/%.,'\"[]0123456789not", max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        condition = parse(text)
    except ConditionError as error:
        assert 0 <= error.offset < max(1, len(text))
    else:
        assert condition.evaluate(dict.fromkeys(condition.names, 1), not_=operator.not_) is not None
