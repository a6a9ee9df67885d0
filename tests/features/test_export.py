"""Programs of torch.export: rewritten, valid, as eager forward and backward, saved and loaded."""

import copy

import pytest
import torch
from torch.export import Dim, export
from torch.nn import functional

import precisionpass
from precisionpass import PrecisionPassError, Rule
from tests.agreement import counts, relative, same, step
from tests.small_models import FAMILIES, Stack, family

EVERY = [Rule(id="all", match={"op": ["attention", "softmax", "log_softmax", "layer_norm", "rms_norm"]},
              apply={"implementation": "auto"}),
         Rule(id="norms", match={"op": ["softmax", "log_softmax", "layer_norm", "rms_norm"]},
              apply={"lowering": "kernel"})]  # fmt: skip


def calls(program, name: str) -> int:
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return sum(n.target is getattr(torch.ops.precisionpass, name).default for g in graphs for n in g.nodes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_program_runs_as_eager_forward_and_backward(dynamic):
    torch.manual_seed(0)
    model, x = Stack(2), torch.randn(2, 6, 32)
    sizes = ({0: Dim("batch", min=2, max=8), 1: Dim("length", min=2, max=64)},) if dynamic else None
    program = export(model, (x,), dynamic_shapes=sizes)
    before = [str(node) for node in program.graph.nodes]
    made = precisionpass.rewrite(program)
    assert [str(node) for node in program.graph.nodes] == before
    assert counts(precisionpass.report(made)) == {"attention": 2}
    assert [s.module for s in precisionpass.report(made).sites if s.kind == "attention"] == [
        "0.attention",
        "1.attention",
    ]
    assert calls(made, "attention") == 2
    for shape in [(2, 6, 32), *([(3, 9, 32), (5, 2, 32)] if dynamic else [])]:
        x = torch.randn(*shape, requires_grad=True)
        same(step(made.module(), (x,)), step(model, (x,)), 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_model_families(name, attention):
    torch.manual_seed(0)
    model, inputs = family(name, attention)
    program = export(model.eval(), (), inputs)
    made = precisionpass.rewrite(program, rules=EVERY)
    found, kept = counts(precisionpass.report(made)), counts(precisionpass.report(made), "kept")
    assert found["attention"] == {"t5": 6}.get(name, 2) and not kept
    with torch.no_grad():
        ours, theirs = made.module()(**inputs), model(**inputs)
    assert relative(ours[0], theirs[0]) <= 1e-5


def test_a_program_is_saved_loaded_and_decomposed(tmp_path):
    torch.manual_seed(0)
    model, x = Stack(1).eval(), torch.randn(2, 6, 32)
    made = precisionpass.rewrite(export(model, (x,)), rules=EVERY)
    torch.export.save(made, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for program in (loaded, made.run_decompositions()):
        assert calls(program, "attention") == calls(program, "layer_norm") == 1
        assert relative(program.module()(x), model(x)) <= 1e-5


def test_the_output_itself_may_be_a_site():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v, functional.scaled_dot_product_attention(q, k, v)

    inputs = tuple(torch.randn(2, 3, 5, 8) for _ in range(3))
    made = precisionpass.rewrite(export(Model(), inputs))
    assert calls(made, "attention") == 2
    for ours, theirs in zip(made.module()(*inputs), Model()(*inputs), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_inside_no_grad_autocast_and_branches():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            with torch.no_grad():
                first = (q @ k.mT).softmax(-1) @ v
            with torch.autocast("cpu", torch.bfloat16):
                second = (q @ k.mT).softmax(-1) @ v
            attend = lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).clone()  # noqa: E731
            third = torch.cond(q.sum() > 0, attend, lambda q, k, v: (q + v).clone(), (q, k, v))
            return first, second, third

    inputs = tuple(torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    made = precisionpass.rewrite(export(Model(), inputs))
    assert calls(made, "attention") == 3, precisionpass.report(made).text()
    for sign in (1, -1):
        signed = (sign * inputs[0].detach().abs(), *inputs[1:])
        same(step(made.module(), signed), step(Model(), signed), 2e-2)


def test_buffers_are_changed_as_in_the_model():
    class Counting(Stack):
        def __init__(self):
            super().__init__(1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return super().forward(x) * self.count

    model, x = Counting(), torch.randn(2, 6, 32)
    made = precisionpass.rewrite(export(copy.deepcopy(model), (x,))).module()
    for _ in range(2):
        assert torch.allclose(made(x), model(x), atol=1e-5)
    assert calls(precisionpass.rewrite(export(copy.deepcopy(model), (x,))), "attention") == 1


@pytest.mark.parametrize(("where", "rewritten"), [("seq_q >= 2", 1), ("seq_q >= 6", 0), ("not seq_q >= 6", 0)])
def test_a_condition_counts_only_where_it_holds_for_every_size(where, rewritten):
    """Nothing would check it later: an exported program has no guards of ours."""
    rules = [Rule(id="long", match={"op": "attention", "where": where}, apply={"implementation": "auto"})]
    sizes = ({1: Dim("length", min=2, max=64)},)
    program = export(Stack(1), (torch.randn(2, 8, 32),), dynamic_shapes=sizes)
    made = precisionpass.rewrite(program, rules=rules)
    assert calls(made, "attention") == rewritten
    assert str(made.range_constraints) == str(program.range_constraints)
    for length in (2, 40):
        made.module()(torch.randn(2, length, 32))


def test_something_else_is_refused_and_off_changes_nothing():
    with pytest.raises(PrecisionPassError, match="ExportedProgram"):
        precisionpass.rewrite(Stack(1))  # type: ignore[arg-type]
    program = export(Stack(1), (torch.randn(2, 6, 32),))
    made = precisionpass.rewrite(program, rules="off")
    assert [str(n.target) for n in made.graph.nodes] == [str(n.target) for n in program.graph.nodes]
