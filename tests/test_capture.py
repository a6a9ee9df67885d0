"""Where things are in a captured graph: module names, sources, child graphs, gradients wanted, dry runs."""

import importlib
import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import precisionpass
from precisionpass.capture import captured_graphs, dry_run, module_names
from tests.small_models import Stack

PRIVATE = {
    "torch._dynamo.exc": ["BackendCompilerFailed", "TorchDynamoException"],
    "torch._dynamo.symbolic_convert": ["InstructionTranslator"],
    "torch._dynamo.utils": ["get_compilation_metrics"],
    "torch.fx.experimental.symbolic_shapes": ["ShapeEnv", "guard_or_false", "statically_known_true"],
    "torch.nn.modules.transformer": ["_detect_is_causal_mask"],
    "torch.utils._pytree": ["tree_map"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PRIVATE.items() for n in names])
def test_private_torch_names_are_where_capture_looks(module, name):
    assert hasattr(importlib.import_module(module), name), (
        f"torch {torch.__version__} moved {module}.{name}: precisionpass/capture.py must follow"
    )


def captured(call, *args, dynamic=None):
    kept = []

    def keep(module, inputs):
        kept.append(module)
        return module

    torch._dynamo.reset()
    torch.compile(call, backend=keep, dynamic=dynamic)(*args)
    return kept


def test_private_marks_that_dynamo_leaves_on_nodes():
    """example_value, nn_module_stack keyed by the id of a module, stack_trace, _dynamo_source, a shape environment."""
    model = Stack(1)
    (module,) = captured(model, torch.randn(2, 5, 32), dynamic=True)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert all("example_value" in node.meta and hasattr(node, "_dynamo_source") for node in placeholders)
    softmax = next(node for node in module.graph.nodes if "softmax" in node.name)
    assert str(id(model[0].attention)) in {str(key).split("@")[0] for key in softmax.meta["nn_module_stack"]}
    assert 'File "' in softmax.meta["stack_trace"]
    fake = next(n.meta["example_value"] for n in placeholders if isinstance(n.meta["example_value"], torch.Tensor))
    environment = fake.fake_mode.shape_env
    assert hasattr(environment, "create_symintnode")
    assert hasattr(environment, "backed_var_to_val") or hasattr(environment, "var_to_val")


class Nested(nn.Module):
    """Names that are hard to read off a path: lists, dicts, dots, brackets, a shared module."""

    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList([nn.Sequential(nn.Softmax(-1)), nn.Softmax(-1)])
        self.by_name = nn.ModuleDict({"a-b": nn.Softmax(-1), "0": nn.Softmax(-1), "it's": nn.Softmax(-1)})
        self.shared = self.items[1]

    def forward(self, x):
        for module in (*self.items, *self.by_name.values(), self.shared):
            x = module(x)
        return x.softmax(-1)


def test_exact_module_names():
    report = precisionpass.explain(Nested(), (torch.randn(2, 3),), rules="watch")
    assert [site.module for site in report.sites] == [
        "items.0.0", "items.1", "by_name.a-b", "by_name.0", "by_name.it's", "items.1", "",
    ]  # fmt: skip


def test_without_the_model_names_are_read_off_the_path():
    """As with the backend by name."""
    model = Nested()
    (module,) = captured(model, torch.randn(2, 3))
    (graph,) = captured_graphs(module, module_names(None), True)
    names = [graph.origin([node]).module for node in module.graph.nodes if node.op.startswith("call_")]
    assert names == ["items.0.0", "items.1", "by_name.a-b", "by_name.0", "by_name.it's", "items.1", ""]


def test_sources_are_the_users_lines_without_machine_paths():
    report = precisionpass.explain(Nested(), (torch.randn(2, 3),), rules="watch")
    assert {site.source.split(":")[0] for site in report.sites} == {"tests/test_capture.py"}
    gpt2 = precisionpass.explain(lambda x: torch.nn.functional.softmax(x, -1), (torch.randn(2, 3),), rules="watch")
    assert gpt2.sites[0].source.startswith("tests/test_capture.py:")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("requires", [True, False])
def test_wants_gradients(grad, requires):
    with torch.set_grad_enabled(grad):
        (module,) = captured(lambda x: x.softmax(-1), torch.randn(2, 3, requires_grad=requires))
        (graph,) = captured_graphs(module, {}, True)
        assert graph.wants_gradients is (grad and requires)


def test_sizes_become_numbers_of_the_captured_environment():
    (module,) = captured(lambda x: x.softmax(-1), torch.randn(4, 6), dynamic=True)
    (graph,) = captured_graphs(module, {}, True)
    size = next(n for n in module.graph.nodes if "softmax" in n.name).meta["example_value"].shape[0]
    expression = size.node.expr
    assert graph.sized(3) == 3
    assert graph.sized("text") == "text"
    doubled = graph.sized(2 * expression)
    assert isinstance(doubled, torch.SymInt)
    assert graph.holds(doubled == 8)
    assert not graph.holds(doubled > 8)


def test_a_norm_whose_last_cast_stands_in_the_next_module_keeps_its_name():
    class Norm(nn.Module):
        def forward(self, x):
            wide = x.float()
            return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)

    class Gate(nn.Module):
        def forward(self, x):
            return torch.tanh(x.to(torch.float32))

    report = precisionpass.explain(nn.Sequential(Norm(), Gate()), (torch.randn(2, 8),), rules="watch")
    assert [(site.kind, site.module) for site in report.sites] == [("rms_norm", "0")]


def test_a_dry_run_runs_nothing():
    """No kernel is called: the answers are stand-ins of the right shape, and integers are exact."""
    ran = []

    class Model(nn.Module):
        def forward(self, x):
            y = x.softmax(-1)
            torch._dynamo.graph_break()
            ran.append(y.detach().clone())
            return y * 2

    graphs = []
    dry_run(Model(), (torch.ones(2, 3),), {}, graphs.append)
    assert len(graphs) == 2
    assert torch.equal(ran[0], torch.zeros(2, 3))


def test_a_dry_run_computes_what_later_sizes_depend_on():
    """A mask of ones made in one graph gives a length in the next; no parameter goes into it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            mask, y = torch.ones(x.shape[0], 5), self.inner(x)
            torch._dynamo.graph_break()
            seen.append((mask.clone(), y.detach().clone()))
            return y.softmax(-1)

    seen = []
    precisionpass.explain(Model(), (torch.ones(7, 3),), rules="watch")
    ((mask, y),) = seen
    assert (float(mask.sum()), bool(y.any())) == (35, False)


def test_what_torch_cannot_capture_is_said_with_its_reason():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 3)

        def forward(self, x):
            return self.lstm(x)[0].softmax(-1)

    def broken(x):
        y = x.softmax(-1)
        torch._dynamo.graph_break()
        return y * 2

    (_, event) = precisionpass.explain(Recurrent(), (torch.ones(2, 1, 3),)).events
    assert re.fullmatch(r"torch.compile runs forward \(.*test_capture.py:\d+\) as it is, uncaptured: .*LSTM.*", event)
    (event,) = precisionpass.explain(broken, (torch.ones(2, 3),)).events
    assert re.match(r"torch.compile breaks the graph in broken \(.*test_capture.py:\d+\): .*graph_break", event)


def test_explain_follows_every_branch_that_python_takes():
    class Branching(nn.Module):
        def forward(self, x, deep):
            if x.shape[0] > 2 and deep:
                torch._dynamo.graph_break()
                return x.log_softmax(-1)
            return x.softmax(-1)

    kinds = [
        [site.kind for site in precisionpass.explain(Branching(), (torch.randn(n, 3), deep), rules="watch").sites]
        for n, deep in ((2, True), (3, True), (3, False))
    ]
    assert kinds == [["softmax"], ["log_softmax"], ["softmax"]]


def test_a_model_too_large_to_hold_is_explained_on_meta_tensors():
    """Two layers as wide as a 70B Llama's."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(**wide, num_hidden_layers=2, vocab_size=128256, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 4096, dtype=torch.long)
    report = precisionpass.explain(model, (tokens,), training=True)
    sites = [site for site in report.sites if site.kind == "attention"]
    assert [site.module for site in sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert {(s.decision, s.facts["heads"], s.facts["kv_heads"], s.facts["seq_q"]) for s in sites} == {
        ("rewritten", 64, 8, 4096)
    }
    assert report.seconds / report.nodes < 0.05


def test_a_function_that_is_captured_by_itself_belongs_to_the_module_that_called_it():
    def spline(x):
        torch._dynamo.graph_break()
        return x[0].softmax(-1) + 1

    class Flow(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return spline([x])

    model = nn.Sequential(nn.ReLU(), nn.Sequential(Flow()))
    torch._dynamo.reset()
    [site] = precisionpass.explain(model, (torch.randn(3, 4),)).sites
    assert (site.module, site.module_class) == ("1.0", "Flow")
