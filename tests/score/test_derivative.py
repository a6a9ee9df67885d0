"""The derivative of a score expression against torch's autograd, ties and bounds included."""

import pytest
import torch

from precisionpass.score.derivative import derivative
from precisionpass.score.evaluate import evaluate
from precisionpass.score.grammar import number, parse

EXPRESSIONS = [
    "s",
    "3 * s - s * t0 / 2",
    "s / t0 + t0 / s",
    "20 * tanh(s / 20)",
    "exp(-s * s) + log(s * s + 1) + sqrt(s * s + t0 * t0)",
    "abs(s) - abs(t0 * s)",
    "max(s, t0) * min(s, 2 * t0)",
    "max(s, 1) + min(s, 1)",
    "clamp(s, -1, 1)",
    "clamp(s, t0 - 1, t0)",
    "clamp(s, 0.5, t0)",
    "clamp(s, t0, 0.5)",
    "where(s > t0, s * t0, -inf)",
    "where(s > 0 and not t0 > 1, s, t0)",
    "-(-s - t0)",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_it_is_autograds(text):
    points = torch.tensor([-2.5, -1.0, -0.3, 0.7, 1.0, 2.0, 1e-3], dtype=torch.float64)
    s, t = (part.clone().requires_grad_() for part in torch.meshgrid(points, points, indexing="ij"))
    tree = parse(text)
    value = evaluate(tree, {"s": s, "t0": t}, s)
    for name, gradient in zip(("s", "t0"), torch.autograd.grad(value.sum(), (s, t), allow_unused=True), strict=True):
        slope = derivative(tree, name)
        assert parse(str(slope)) == slope
        got = evaluate(slope, {"s": s.detach(), "t0": t.detach()}, s.detach()).expand(s.shape)
        torch.testing.assert_close(got, torch.zeros_like(s) if gradient is None else gradient, msg=f"{text} by {name}")


def test_a_part_without_the_name_is_an_exact_zero():
    assert derivative(parse("where(t0 > 0, s, -inf)"), "t0") == number(0.0)
    masked = derivative(parse("where(t0 > 0, s, -inf)"), "s")
    assert str(masked) == "where((t0 > 0.0), 1.0, 0.0)"
