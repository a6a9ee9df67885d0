"""The backend: private torch API by name, the inner backends, and that nothing changes where nothing is rewritten."""

import copy
import importlib

import pytest
import torch

import precisionpass
from precisionpass import Rule
from precisionpass.backend import Backend
from precisionpass.rules import load
from tests.agreement import same, step
from tests.small_models import Stack, family

PRIVATE = {
    "torch._dynamo.backends.registry": ["lookup_backend"],
    "torch._guards": ["TracingContext", "CompileContext"],
    "torch._inductor": ["list_mode_options"],
    "torch._inductor.compile_fx": ["compile_fx"],
    "torch._C._autograd": ["_top_saved_tensors_default_hooks"],
    "torch._inductor.custom_graph_pass": ["CustomGraphPass"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PRIVATE.items() for n in names])
def test_private_torch_names_are_where_backend_and_cache_look(module, name):
    assert hasattr(importlib.import_module(module), name), (
        f"torch {torch.__version__} moved {module}.{name}: precisionpass/backend.py or cache.py must follow"
    )


def test_private_torch_settings_are_what_backend_and_cache_expect():
    assert hasattr(torch._inductor.config, "post_grad_custom_pre_pass"), "cache.py puts its key there"
    assert hasattr(torch._inductor.config, "emulate_precision_casts"), "backend.py keeps the user's casts with it"
    assert isinstance(torch._dynamo.config.recompile_limit, int)
    assert hasattr(torch._guards.CompileContext, "current_compile_id")


NOTHING = (
    "off",
    "watch",
    [Rule(id="elsewhere", match={"op": "attention", "module": "no.such"}, apply={"delta": "output"})],
    [Rule(id="never", match={"op": "attention", "where": "seq_q > 100000"}, apply={"delta": "output"})],
)


@pytest.mark.parametrize("rules", NOTHING, ids=["off", "watch", "no module matches", "no condition holds"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_rewritten_is_the_inner_backend_bit_for_bit(rules, backend, dtype):
    model, x = Stack(1, dropout=0.2).to(dtype), torch.randn(2, 6, 32, dtype=dtype)
    alone = copy.deepcopy(model)
    alone.compile(backend=backend)
    torch._dynamo.reset()
    expected = step(alone, (x,))
    torch._dynamo.reset()
    same(step(precisionpass.compile(model, rules=rules, backend=backend), (x,)), expected, 0.0)
    assert "rewritten" not in {site.decision for site in precisionpass.report(model).sites}


@pytest.mark.parametrize("rules", ["off", [Rule(id="r", match={"op": "attention"}, apply={"implementation": "keep"})]])
def test_nothing_rewritten_is_the_same_graph(rules):
    """Node by node, on a whole model."""
    seen = {}

    def keep(name):
        def backend(module, inputs):
            seen[name] = module.print_readable(print_output=False)
            return module

        return backend

    model, kwargs = family("t5", "eager", layers=1)
    torch._dynamo.reset()
    torch.compile(model, backend=keep("alone"))(**kwargs)
    torch._dynamo.reset()
    precisionpass.compile(model, rules=rules, backend=keep("ours"))(**kwargs)
    assert seen["ours"] == seen["alone"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_same_seed_gives_the_same_result_twice(backend):
    torch._dynamo.reset()
    model, x = Stack(2, dropout=0.3), torch.randn(2, 6, 32)
    precisionpass.compile(model, backend=backend)
    first = step(model, (x,), seed=11)
    same(step(model, (x,), seed=11), first, 0.0)
    torch._dynamo.reset()
    twin = precisionpass.compile(copy.deepcopy(model).train(), backend=backend)
    same(step(twin, (x,), seed=11), first, 0.0)
    assert not torch.equal(step(model, (x,), seed=12).outputs[0], first.outputs[0])


def test_dropout_in_eval_mode_is_none_and_draws_nothing():
    torch._dynamo.reset()
    model, x = Stack(1, dropout=0.5).eval(), torch.randn(2, 6, 32)
    expected = model(x)
    precisionpass.compile(model, backend="aot_eager")
    before = torch.get_rng_state()
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_random_number_a_site_whatever_its_size():
    """The seed node: the generator moves on by the same amount for small and large inputs."""
    torch._dynamo.reset()
    model = precisionpass.compile(Stack(1, dropout=0.5), backend="aot_eager", dynamic=True)
    states = []
    for length in (4, 16):
        torch.manual_seed(0)
        model(torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1)))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_casts_of_the_users_are_kept_only_where_something_was_rewritten():
    patches = {}

    class Spy(Backend):
        def _compile(self, module, inputs, rewrote, ours, by_action):
            patches[self.rules.name] = rewrote
            return module

    def call(q):
        return (q @ q.mT).softmax(-1) @ q

    for rules in ("stable-bf16", "watch"):
        torch._dynamo.reset()
        torch.compile(call, backend=Spy(load(rules)))(torch.randn(2, 3, 5, 8))
    assert patches == {"stable-bf16": True, "watch": False}
