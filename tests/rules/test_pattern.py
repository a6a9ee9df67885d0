"""Patterns over module names."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precisionpass.rules.pattern import PatternError, check_pattern, matches


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("model.layers.*.self_attn", ["model.layers.0.self_attn", "model.layers.17.self_attn"],
         ["model.layers.self_attn", "model.layers.0.1.self_attn", "x.model.layers.0.self_attn", "model.layers.0"]),
        ("model.layers.**", ["model.layers", "model.layers.0", "model.layers.0.attn.q"], ["model", "model.layers2"]),
        ("**.self_attn", ["self_attn", "a.self_attn", "a.b.self_attn"], ["a.self_attn.q", "my_self_attn"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "b", "a.bb", "ab"]),
        ("**.layers.**.q", ["layers.q", "x.layers.0.layers.q"], ["layers.0.k"]),
        ("**", ["", "a", "a.b"], []),
        ("*", ["a"], ["", "a.b"]),
        ("layers.[0-3].attn?", ["layers.2.attn1"], ["layers.4.attn1", "layers.2.attn", "layers.2.attn12"]),
        ("layers.[!0]", ["layers.1"], ["layers.0"]),
        ("Layers.0", ["Layers.0"], ["layers.0"]),
        ("*Attention", ["LlamaAttention", "Attention"], ["AttentionBlock"]),
        (r"re:layers\.(\d+)\.attn", ["layers.12.attn"], ["layers.x.attn", "x.layers.1.attn", "layers.1.attn.q"]),
        ("re:(a|b)", ["a", "b"], ["ab"]),
        ("re:", [""], ["a"]),
    ],
)  # fmt: skip
def test_meaning(pattern, yes, no):
    check_pattern(pattern)
    assert [name for name in [*yes, *no] if matches(pattern, name)] == yes


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", 'the pattern is empty; the root module is matched by "**"'),
        ("a..b", "two dots meet, or a dot is first or last"),
        (".a", "two dots meet, or a dot is first or last"),
        ("layers.**attn", '** must be a whole part between dots, as in "layers.**", not "**attn"'),
        ("a b", """' ' is in no module name; for a regular expression write "re:...\""""),
        ("(a|b)", """'(' is in no module name; for a regular expression write "re:...\""""),
        ("a" * 201, "the pattern has 201 characters; the limit is 200"),
        ("re:(", "the regular expression cannot be read: missing ), unterminated subpattern"),
        ("re:a{5,2}", "the regular expression cannot be read: min repeat greater than max repeat"),
        ("re:x{9999999999999}", "the regular expression cannot be read: it is too large"),
        ("re:[[a]", "the regular expression cannot be read: it is ambiguous"),
        ("re:(a+)+", "a repeated group must not hold a repeat or a choice"),
        ("re:(a|aa)*", "a repeated group must not hold a repeat or a choice"),
        ("re:((a*)b)+", "a repeated group must not hold a repeat or a choice"),
        ("re:(a?){20}", "a repeated group must not hold a repeat or a choice"),
        ("re:(a+)?b", "a repeated group must not hold a repeat or a choice"),
        (r"re:(a)\1", "back references, look-around and inline flags are not part of module patterns"),
        ("re:(?=a)a", "back references, look-around and inline flags are not part of module patterns"),
        ("re:(?i)a", "back references, look-around and inline flags are not part of module patterns"),
        ("re:" + ".*" * 5, "more than 4 repeats of any character in one regular expression"),
        ("re:" + r"\w+[^.]*" * 3, "more than 4 repeats of any character in one regular expression"),
        ("layers[0", 'a [ without its ] is in "layers[0"'),
        ("layers0].a", 'a [ without its ] is in "layers0]"'),
        ("layers[9-0]", "the range 9-0 runs backwards"),
        ("re:" + "a?" * 7, "more than 6 repeats in one regular expression"),
    ],
)
def test_refusals(pattern, message):
    with pytest.raises(PatternError) as raised:
        check_pattern(pattern)
    assert str(raised.value) == message


@given(st.text("ab.*?[]!+(){}|\\:re0", max_size=30), st.text("ab.0", max_size=30))
def test_any_pattern_is_refused_or_answers_at_once(pattern, name):
    try:
        check_pattern(pattern)
    except PatternError:
        return
    assert matches(pattern, name) in (True, False)


@pytest.mark.parametrize("pattern", ["**.*a*a*a*a*a*b", "**.a.**.a.**.a.**.b", "*".join("a" * 30) + "b"])
def test_globs_never_take_long(pattern):
    check_pattern(pattern)
    start = time.perf_counter()
    assert not matches(pattern, ".".join(["a" * 50] * 50))
    assert time.perf_counter() - start < 0.2
