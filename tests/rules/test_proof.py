"""What is proved of conditions is true, and what is true and simple is proved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precisionpass.rules.condition import parse
from precisionpass.rules.proof import follows, never


@pytest.mark.parametrize(
    "text",
    [
        "seq_q > 5 and seq_q < 3", "seq_q > 5 and seq_q < 6", "seq_q < 0", "heads + 1 <= 0", "3 < seq_q < 4",
        "dtype == bf16 and dtype == fp16", "dtype == bf16 and dtype not in (bf16, fp16)", "causal and not causal",
        "causal == true and causal == false", "seq_q % 2 == 0 and seq_q % 2 == 1", "seq_q % 4 == 1 and seq_q % 2 == 0",
        "seq_q // 8 > 3 and seq_q < 32", "seq_q > seq_k and seq_k > batch and batch > seq_q",
        "2 * seq_q == 2 * seq_k + 1",
        "dropout > 1", "dropout > 0.5 and dropout < 0.25", "heads * kv_heads > 8 and kv_heads * heads < 8",
        "not (seq_q > 3 or seq_q <= 3)", "seq_q > 4.5 and seq_q < 5", "seq_q != 3 and seq_q == 3",
        "dtype == statistics and dtype != statistics", "(seq_q < 0 or causal) and not causal", "false and causal",
    ],
)  # fmt: skip
def test_what_never_holds(text):
    assert never(parse(text).tree)


@pytest.mark.parametrize(
    "text",
    [
        "seq_q > 5", "seq_q > 5 and seq_q < 7", "dtype not in (bf16, fp16, fp32, fp64)", "seq_q == 0", "causal",
        "dropout > 0.5 and dropout < 0.6", "softcap < 0", "heads * kv_heads < 8", "causal != masked",
        "seq_q % 4 == 1 and seq_q % 3 == 0", "dtype != statistics", "seq_q != seq_k",
        " or ".join(["seq_q > 0"] * 60), "not causal or causal",
    ],
)  # fmt: skip
def test_what_can_hold(text):
    assert not never(parse(text).tree)


@pytest.mark.parametrize(
    ("weak", "strong"),
    [
        ("seq_q > 3", "seq_q >= 4"), ("seq_q >= 4", "seq_q > 3"), ("dtype in (bf16, fp16)", "dtype == fp16"),
        ("seq_q >= 1024", "seq_q == seq_k and seq_k >= 2048"), ("dtype != fp32", "dtype == bf16"),
        ("not causal or seq_q > 1", "seq_q > 5"), ("seq_q % 2 == 0", "seq_q % 4 == 0"),
    ],
)  # fmt: skip
def test_what_follows(weak, strong):
    assert follows(parse(weak).tree, parse(strong).tree)
    assert follows(parse(strong).tree, parse(weak).tree) is (strong in ("seq_q > 3", "seq_q >= 4"))


def test_what_is_too_large_is_not_proved():
    text = " and ".join(f"(seq_q != {number})" for number in range(40))
    assert not never(parse(f"{text} and seq_q < 40").tree)


size = st.sampled_from(["seq_q", "seq_k", "3", "0", "7", "seq_q % 3", "seq_k // 2", "seq_q + seq_k", "seq_q * seq_k"])
literal = st.one_of(
    st.tuples(size, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), size).map(" ".join),
    st.sampled_from(["causal", "not causal", "dtype == bf16", "dtype in (bf16, fp16)", "dtype != fp16"]),
)
condition = st.recursive(
    literal,
    lambda inner: st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
        lambda parts: f"(not ({parts[0]}) {parts[1]} {parts[2]})"
    ),
    max_leaves=5,
)
facts = st.fixed_dictionaries({
    "seq_q": st.integers(0, 12), "seq_k": st.integers(0, 12), "causal": st.booleans(),
    "dtype": st.sampled_from(["bf16", "fp16", "fp32", "fp8"]),
})  # fmt: skip


@given(condition.map(lambda text: f"({text}) and seq_q >= 0"), st.lists(facts, min_size=20, max_size=20))
def test_what_holds_at_some_site_is_never_called_impossible(text, sites):
    parsed = parse(text)
    if any(parsed.evaluate(site) for site in sites):
        assert not never(parsed.tree)
