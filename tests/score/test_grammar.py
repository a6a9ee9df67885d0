"""The score grammar: what parses, what it means on tensors, and what is refused with which words."""

import pytest
import torch

from precisionpass.score.evaluate import evaluate
from precisionpass.score.grammar import ScoreError, parse, to_text

VALUES = {
    "s": torch.linspace(-3, 3, 12).view(1, 1, 3, 4),
    "t0": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    "t1": torch.tensor([True, False, True, True]),
    "i": torch.arange(3.0).view(3, 1),
    "j": torch.arange(4.0),
}
S, T, SEEN, ROW, KEY = VALUES.values()


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("s", S),
        ("s + 1", S + 1),
        ("-s * 2 - t0 / 4", -S * 2 - T / 4),
        ("where(i - j < 1, s, -inf)", torch.where(ROW - KEY < 1, S, torch.tensor(-torch.inf))),
        ("where(t1 and not s > 0, 1, 0)", (SEEN & ~(S > 0)).float()),
        ("where(j <= i or j == 3, s, 0)", torch.where((KEY <= ROW) | (KEY == 3), S, torch.tensor(0.0))),
        ("min(s, t0) + max(s, 0.5)", torch.minimum(S, T) + S.clamp(min=0.5)),
        ("clamp(s, -1, 1e0)", S.clamp(-1, 1)),
        ("tanh(s) + exp(-s) + abs(s) + sqrt(abs(s)) + log(abs(s) + 1)",
         S.tanh() + (-S).exp() + S.abs() + S.abs().sqrt() + (S.abs() + 1).log()),
        ("where(s != 0, 1, 2)", torch.where(S != 0, torch.tensor(1.0), torch.tensor(2.0))),
    ],
)  # fmt: skip
def test_an_expression_means_what_torch_means(text, meaning):
    tree = parse(text)
    value = evaluate(tree, VALUES, S)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.expand(S.shape), meaning.expand(S.shape))
    assert parse(to_text(tree)) == tree and str(tree) == to_text(tree)


def test_names_are_known_without_evaluating():
    assert parse("where(t3 > 0, s, t0 * h)").names() == {"t3", "s", "t0", "h"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("__import__('os')", "__import__"),
        ("s.backward()", "s.backward()"),
        ("s if t0 else 1", "s if t0 else 1"),
        ("s ** 2", "s ** 2"),
        ("x + 1", "'x'"),
        ("tanh(s, s)", "tanh(s, s)"),
        ("where(0 < s < 1, s, 0)", "0 < s < 1"),
        ("[s]", "[s]"),
        ("'s'", "'s'"),
        ("True", "True"),
        ("clamp(s, lo=1, hi=2)", "clamp(s, lo=1, hi=2)"),
        ("lambda: s", "lambda: s"),
        ("s +", "s +"),
        ("", "''"),
        ("s; s", "s; s"),
        ("+s", "+s"),
    ],
)
def test_anything_else_is_refused_by_the_part_that_is_wrong(text, part):
    with pytest.raises(ScoreError) as caught:
        parse(text)
    assert part in str(caught.value)


def test_size_and_depth_are_bounded():
    with pytest.raises(ScoreError, match="characters"):
        parse("s + " * 10_000 + "s")
    with pytest.raises(ScoreError, match=r"deep|not an expression"):
        parse("tanh(" * 150 + "s" + ")" * 150)
