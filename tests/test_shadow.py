"""The shadow: one spelling for each operation, tied to the captured graph, and nothing disturbed by making it."""

import importlib

import pytest
import torch
from torch.nn import functional
from torch.ops import aten
from torch.utils.checkpoint import checkpoint

from precisionpass import graph
from precisionpass.shadow import holds_anchor, make_shadow
from tests.test_capture import captured

PRIVATE = {
    "torch._guards": ["TracingContext"],
    "torch._ops": ["HigherOrderOperator", "OpOverload", "_get_dispatch_mode_pre_dispatch"],
    "torch._subclasses.fake_tensor": ["FakeTensor", "FakeTensorMode"],
    "torch.fx.experimental.proxy_tensor": ["get_proxy_slot", "make_fx", "track_tensor_tree"],
    "torch.fx.experimental.symbolic_shapes": ["ShapeEnv"],
    "torch.amp.autocast_mode": ["_enter_autocast", "_exit_autocast"],
    "torch._C": ["_TorchDispatchModeKey"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PRIVATE.items() for n in names])
def test_private_torch_names_are_where_the_shadow_looks(module, name):
    assert hasattr(importlib.import_module(module), name), (
        f"torch {torch.__version__} moved {module}.{name}: precisionpass/shadow.py must follow"
    )


def test_private_methods_of_the_shape_environment():
    environment = importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv
    assert hasattr(environment, "suppress_guards") and hasattr(environment, "ignore_fresh_unbacked_symbols")


def shadow_of(call, *args, dynamic=None):
    (module,) = captured(call, *args, dynamic=dynamic)
    return module, make_shadow(module)


def operations(shadow) -> list:
    return [graph.packet(node) for node in shadow.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "spelled",
    [
        lambda x: functional.softmax(x, -1),
        lambda x: x.softmax(dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.nn.Softmax(-1)(x),
    ],
)
def test_one_spelling_of_softmax(spelled):
    _, shadow = shadow_of(spelled, torch.randn(2, 3))
    assert operations(shadow) == [aten.softmax]


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (lambda x: torch.einsum("ij,kj->ik", x, x), aten.einsum),
        (lambda x: x @ x.mT, aten.matmul),
        (lambda x: functional.linear(x, x), aten.linear),
        (lambda x: functional.dropout(x, 0.5), aten.dropout),
        (lambda x: functional.layer_norm(x, (3,)), aten.layer_norm),
        (lambda x: functional.scaled_dot_product_attention(x, x, x), aten.scaled_dot_product_attention),
    ],
)
def test_what_stays_whole(call, kept):
    _, shadow = shadow_of(call, torch.randn(3, 3))
    assert kept in operations(shadow)


def test_nodes_are_tied_to_the_captured_graph():
    module, shadow = shadow_of(lambda x: torch.add(x.softmax(-1), 1), torch.randn(2, 3))
    softmax, add = (next(n for n in module.graph.nodes if word in n.name) for word in ("softmax", "add"))
    assert graph.packet(shadow.image[softmax]) is aten.softmax
    assert shadow.source[shadow.image[add]] is add
    assert shadow.owner[shadow.image[add]] is add


def test_the_captured_graph_and_its_values_are_untouched():
    def call(x, y):
        x = x.clone()
        x.t_()
        x.add_(y)
        return x.softmax(-1)

    module, _ = None, None
    (module,) = captured(call, torch.randn(3, 4), torch.randn(4, 3))
    before = [(n.name, n.target, str(n.args), str(n.meta.get("example_value"))) for n in module.graph.nodes]
    make_shadow(module)
    assert [(n.name, n.target, str(n.args), str(n.meta.get("example_value"))) for n in module.graph.nodes] == before


@pytest.mark.parametrize("dynamic", [True, False])
def test_nothing_is_disturbed(dynamic):
    def call(x, n):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            y = functional.dropout(x @ x.mT, 0.5)
        return y.softmax(-1)[: x.shape[0]]

    (module,) = captured(call, torch.randn(6, 4), 3, dynamic=dynamic)
    fake = next(n.meta["example_value"] for n in module.graph.nodes if "softmax" in n.name)
    environment = fake.fake_mode.shape_env
    rng, guards = torch.get_rng_state(), list(environment.guards)
    make_shadow(module)
    assert torch.equal(torch.get_rng_state(), rng)
    assert list(environment.guards) == guards
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_formats_inside_autocast_are_the_real_ones():
    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.mT
            with torch.autocast("cpu", enabled=False):
                z = x @ x.mT
        return y, z, x @ x.mT

    _, shadow = shadow_of(call, torch.randn(4, 4))
    found = [graph.dtype(node) for node in shadow.graph.nodes if graph.packet(node) is aten.matmul]
    assert found == [torch.bfloat16, torch.float32, torch.float32]


def test_what_is_not_looked_into_is_opaque_and_read_as_used():
    def call(x):
        y = x.softmax(-1)
        return checkpoint(torch.sin, torch.vmap(torch.sum)(y), use_reentrant=False)

    _, shadow = shadow_of(call, torch.randn(3, 4))
    softmax = next(n for n in shadow.graph.nodes if graph.packet(n) is aten.softmax)
    assert softmax.meta["live"] and shadow.opaque
    assert aten.sum not in operations(shadow)


def test_what_nothing_comes_of_is_not_live():
    def call(x):
        x.exp()
        return x.softmax(-1)

    _, shadow = shadow_of(call, torch.randn(2, 3))
    live = {graph.packet(n): n.meta["live"] for n in shadow.graph.nodes if n.op == "call_function"}
    assert live == {aten.exp: False, aten.softmax: True}


def test_a_graph_without_an_anchor_is_never_shadowed():
    (without,) = captured(lambda x: (x + 1).relu(), torch.randn(2))
    (with_one,) = captured(lambda x: x.softmax(-1), torch.randn(2))
    assert (holds_anchor(without), holds_anchor(with_one)) == (False, True)
