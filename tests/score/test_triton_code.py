"""A score expression as Triton statements: the meaning of ``evaluate``, run here with torch in the place of tl."""

import re
from types import SimpleNamespace

import pytest
import torch

from precisionpass.score.derivative import derivative
from precisionpass.score.evaluate import evaluate
from precisionpass.score.grammar import parse
from precisionpass.score.triton_code import triton_statements

TL = SimpleNamespace(
    float32=torch.float32,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    where=torch.where,
    exp=torch.exp,
    log=torch.log,
    sqrt=torch.sqrt,
    abs=torch.abs,
    minimum=lambda a, b, propagate_nan: torch.minimum(a, b),
    maximum=lambda a, b, propagate_nan: torch.maximum(a, b),
    PropagateNan=SimpleNamespace(ALL="all"),
)
VALUES = {
    "s": torch.linspace(-3, 3, 12).view(3, 4),
    "t0": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    "t1": torch.tensor([True, False, True, True]),
    "h": torch.tensor(2.0),
    "b": torch.tensor(0.0),
    "i": torch.arange(3.0).view(3, 1),
    "j": torch.arange(4.0),
}
EXPRESSIONS = [
    "s",
    "1.5",
    "-s * t0 + h / (2 - t0)",
    "where(i - j < 2 and t1, s, -inf) - t0 * (i - j)",
    "20 * tanh(s / 20) + max(t0, s) - min(s, 1)",
    "exp(-s * s) + log(s * s + 1) + sqrt(abs(s))",
    "clamp(s, -1, t0 + 2) + abs(s - t0)",
    "where(not (s > t0 or t1), t1, s != 0) + (j >= 2) * s",
    "where(not t0, s, -s) + where(b == 0, t1, 2)",
]


def run(expressions, booleans=frozenset({"t1"})):
    statements, names = triton_statements(expressions, booleans)
    scope = {"tl": TL, "tanh": torch.tanh, **VALUES}
    exec("\n".join(statements), scope)
    return [scope[name] for name in names]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_value_and_slope_are_those_of_evaluate(text):
    expression = parse(text)
    pair = (expression, derivative(expression, "s"))
    for found, node in zip(run(pair), pair, strict=True):
        expected = evaluate(node, VALUES, VALUES["s"])
        torch.testing.assert_close(found.expand(VALUES["s"].shape), expected.float().expand(VALUES["s"].shape))


def test_equal_parts_are_computed_once():
    statements, names = triton_statements([parse("tanh(s) * tanh(s)"), parse("tanh(s)")], frozenset())
    assert statements == ["x0 = tanh(s)", "x1 = x0 * x0"] and names == ["x1", "x0"]


def test_a_nest_of_functions_and_its_slope_stay_small():
    text = "s"
    for _ in range(25):
        text = f"tanh({text} * t0 + exp(t0))"
    expression = parse(text)
    statements, _ = triton_statements([expression, derivative(expression, "s")], frozenset())
    assert len(statements) < 300


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_nothing_but_statements_of_the_table_is_written(text):
    expression = parse(text)
    statements, _ = triton_statements([expression, derivative(expression, "s")], frozenset({"t1"}))
    word = r"(x\d+|t\d+|[sbhij]|tl\.\w+(\.ALL)?|tanh|propagate_nan|float)"
    allowed = rf'x\d+ = ({word}|"-?(\d+\.\d+(e[+-]\d+)?|inf)"|1\.0|0\.0|[-+*/<>=!&|~(),\[\] ])+'
    assert all(re.fullmatch(allowed, statement) for statement in statements)
