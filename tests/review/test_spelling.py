"""Calls as Python writes them, and as a drawing names them."""

import math
import operator

import pytest
import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn import functional

import precisionpass.ops  # noqa: F401  registers torch.ops.precisionpass
from precisionpass.review.spelling import Speller, Unwritable, readable


def node(target, *args, **kwargs) -> tuple[fx.Node, Speller]:
    """A call in a graph where x and y are given, and a speller of its names."""
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in ("x", "y")}
    args, kwargs = map_aggregate((args, kwargs), lambda a: given.get(a, a) if isinstance(a, str) else a)
    make = graph.call_method if isinstance(target, str) else graph.call_function
    made = make(target, tuple(args), dict(kwargs))
    return made, Speller({n: n.name for n in graph.nodes})


@pytest.mark.parametrize(
    ("call", "text", "label", "imports"),
    [
        (node(torch.matmul, "x", "y"), "torch.matmul(x, y)", "matmul", set()),
        (node(operator.mul, "x", -0.5), "x * (-0.5)", "× -0.5", set()),
        (node(operator.matmul, "x", "y"), "x @ y", "matmul", set()),
        (node(operator.imul, "x", 2), "operator.imul(x, 2)", "imul(2)", {"operator"}),
        (node(operator.getitem, "x", (slice(None), None, ..., slice(1, None, 2))), "x[:, None, ..., 1::2]",
         "[:, None, ..., 1::2]", set()),
        (node(operator.getitem, "x", (0,)), "x[0,]", "[0,]", set()),
        (node(getattr, "x", "mT"), "x.mT", ".mT", set()),
        (node("transpose", "x", -1, -2), "x.transpose(-1, -2)", "transpose(-1, -2)", set()),
        (node("to", "x", torch.bfloat16), "x.to(torch.bfloat16)", "to(bfloat16)", set()),
        (node(functional.softmax, "x", dim=-1, dtype=None), "torch.nn.functional.softmax(x, dim=-1, dtype=None)",
         "softmax(dim=-1)", set()),
        (node(functional.scaled_dot_product_attention, "x", "y", "y"),
         "torch.nn.functional.scaled_dot_product_attention(x, y, y)", "scaled_dot_product_attention", set()),
        (node(torch.ops.aten.add.Tensor, "x", 1), "torch.ops.aten.add.Tensor(x, 1)", "add(1)", set()),
        (node("fill_", "x", -math.inf), 'x.fill_(float("-inf"))', 'fill_(float("-inf"))', set()),
        (node(torch.zeros, 2, 3, device=torch.device("cpu"), memory_format=torch.contiguous_format),
         'torch.zeros(2, 3, device=torch.device("cpu"), memory_format=torch.contiguous_format)', "zeros", set()),
        (node(torch.cat, ["x", "y"], -1), "torch.cat([x, y], -1)", "cat(-1)", set()),
        (node("view", "x", 'quo"te\n'), 'x.view(\'quo"te\\n\')', "view('quo\"te\\n')", set()),
        (node(math.sqrt, 2.0), "math.sqrt(2.0)", "sqrt(2.0)", {"math"}),
        (node(torch.ops.precisionpass.softmax.default, "x", -1), "torch.ops.precisionpass.softmax.default(x, -1)",
         "precisionpass.softmax", {"precisionpass.ops"}),
    ],
)  # fmt: skip
def test_a_call_is_spelled_labelled_and_imports_what_it_needs(call, text, label, imports):
    made, speller = call
    assert speller.call(made) == text
    compile(text, "", "eval")
    assert (speller.label(made)[0], speller.imports) == (label, imports)


def test_what_is_long_stands_below_the_name():
    made, speller = node(torch.randint, 0, 2**31 - 1, (1,), dtype=torch.int64, device=torch.device("meta"))
    name, details = speller.label(made)
    assert name == "randint" and " ".join(details) == '0, 2147483647, (1,), dtype=int64, device=device("meta")'
    assert max(map(len, details)) <= 34


@pytest.mark.parametrize(
    ("target", "args"), [(lambda x: x, ("x",)), (torch.add, (object(),)), (torch.add, (torch.Generator(),))]
)
def test_what_no_file_can_name_is_unwritable(target, args):
    made, speller = node(torch.add)
    made.target, made.args = target, args
    with pytest.raises(Unwritable):
        speller.call(made)


@pytest.mark.parametrize(
    ("placeholder", "name"),
    [
        ("L_self_modules_h_modules_0_modules_attn_parameters_weight_", "h_0_attn_weight"),
        ("L_kwargs_input_ids_", "input_ids"),
        ("L_x_", "x"),
        ("s77", "s77"),
        ("L_self_modules_class_", "L_self_modules_class_"),
        ("L_input_", "L_input_"),
        ("L_torch_", "L_torch_"),
    ],
)
def test_placeholders_have_readable_names(placeholder, name):
    assert readable(placeholder) == name
