"""Models with state: buffers updated once, tied weights, graph breaks, other ways to compile, whole train steps."""

import copy
import functools

import pytest
import torch
from torch import nn

import precisionpass
from tests.agreement import against_eager, counts, same, step
from tests.small_models import Attention, Block, Stack, family


class Normalised(nn.Module):
    """Attention between batch norms, whose running statistics a step updates once."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.BatchNorm1d(32), Attention()

    def forward(self, x):
        return self.attention(self.norm(x.mT.contiguous()).mT.contiguous())


class Cached(nn.Module):
    """Decoding one position at a time into buffers for keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("keys", torch.zeros(2, 4, 8, 8))
        self.register_buffer("values", torch.zeros(2, 4, 8, 8))

    def forward(self, x, position):
        q, k, v = self.qkv(x).view(2, 1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        allowed = torch.arange(8) <= position
        scores = (q @ self.keys.mT / 8**0.5).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1) @ self.values).transpose(1, 2).flatten(2)


def twins(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """(the model as it is, a compiled copy)."""
    torch._dynamo.reset()
    return model, precisionpass.compile(copy.deepcopy(model), **{"backend": "aot_eager", **options})


def same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_batch_norm_is_updated_once(backend):
    model, compiled = twins(Normalised(), backend=backend)
    for _ in range(3):
        x = torch.randn(4, 6, 32)
        same(step(compiled, (x,)), step(model, (x,)), 1e-4)
    same_state(compiled, model)
    assert int(compiled.norm.num_batches_tracked) == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_decoding_with_a_cache(backend):
    model, compiled = twins(Cached(), backend=backend)
    for position in range(8):
        inputs = (torch.randn(2, 1, 32), torch.tensor([position]))
        same(step(compiled, inputs, training=False), step(model, inputs, training=False), 1e-5)
    same_state(compiled, model)
    assert counts(precisionpass.report(compiled)) == {"attention": 1}


def test_generation_with_the_users_own_cache():
    """Hugging Face's dynamic cache grows by one each step; the compiled model writes the same tokens."""
    model, kwargs = family("llama")
    model.eval()
    model.config.use_cache = True
    expected = model.generate(**kwargs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch._dynamo.reset()
    compiled = precisionpass.compile(model, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled.generate(**kwargs, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)
    assert counts(precisionpass.report(compiled))["attention"] >= 2


def test_tied_weights():
    model = Stack(2)
    model[1].attention.qkv.weight = model[0].attention.qkv.weight
    against_eager(model, (torch.randn(2, 6, 32),), rewritten={"attention": 2})
    assert model[1].attention.qkv.weight is model[0].attention.qkv.weight


def test_a_shared_module_is_found_at_each_call_under_its_first_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Attention()
            self.again = self.first

        def forward(self, x):
            return self.again(self.first(x))

    report = against_eager(Twice(), (torch.randn(2, 6, 32),), rewritten={"attention": 2})
    assert [site.module for site in report.sites] == ["first", "first"]


def test_graph_breaks_between_layers():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = Stack(3)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            x = self.second(x)
            torch._dynamo.graph_break()
            return self.third(x)

    report = against_eager(Broken(), (torch.randn(2, 6, 32),), rewritten={"attention": 3})
    assert report.graphs == 3
    assert [s.module for s in report.sites if s.kind == "attention"] == [
        "first.attention", "second.attention", "third.attention"
    ]  # fmt: skip


def test_one_graph_that_serves_many_layers():
    """A graph break in a loop: torch runs one graph for several layers, each with the rewrite."""

    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = Stack(3)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    x = torch.randn(2, 6, 32)
    model, compiled = twins(Looped())
    same(step(compiled, (x,)), step(model, (x,)), 1e-5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(compiled, (x,))
    assert {e.key: e.count for e in profiler.key_averages()}["precisionpass::attention"] == 3


@pytest.mark.parametrize("as_function", [False, True])
def test_a_graph_break_in_front_of_an_attention_loses_no_name(as_function):
    """The graph after it holds no module and reads no parameter: the function's own module names it."""

    def attend(module, q, k, v):
        return (q @ k.mT * module.scale).softmax(-1) @ v

    @functools.partial(torch._dynamo.disable, recursive=False)
    def uncaptured(*args):
        return attend(*args)

    class Broken(Attention):
        scale = 0.3

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            if as_function:
                return uncaptured(self, q, k, v)
            torch._dynamo.graph_break()
            return (q @ k.mT * self.scale).softmax(-1) @ v

    model = nn.Sequential(nn.Linear(32, 32), Broken())
    report = against_eager(model, (torch.randn(2, 6, 32),), rewritten={"attention": 1})
    assert [(site.module, site.module_class) for site in report.sites] == [("1", "Broken")]


def test_a_graph_break_inside_an_attention():
    """The halves are two graphs: no attention, and the softmax alone is what is left."""

    def call(q, k, v):
        scores = q @ k.mT
        torch._dynamo.graph_break()
        return scores.softmax(-1) @ v

    report = against_eager(call, tuple(torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)))
    assert counts(report) == {}


def test_regional_compilation_of_each_block():
    torch._dynamo.reset()
    model, x = Stack(3), torch.randn(2, 6, 32)
    expected = step(copy.deepcopy(model), (x,))
    for block in model:
        precisionpass.compile(block, backend="aot_eager")
    same(step(model, (x,)), expected, 1e-5)
    for block in model:
        assert counts(precisionpass.report(block)) == {"attention": 1}


def test_a_second_compile_of_a_compiled_block_inside_a_compiled_model():
    """An inner in-place compilation is inlined by torch into the outer capture."""
    torch._dynamo.reset()
    model, x = Stack(2), torch.randn(2, 6, 32)
    expected = step(copy.deepcopy(model), (x,))
    precisionpass.compile(model[0], backend="aot_eager")
    precisionpass.compile(model, backend="aot_eager")
    same(step(model, (x,)), expected, 1e-5)
    assert counts(precisionpass.report(model)) == {"attention": 2}


def train(model: nn.Module, call, steps: int = 4) -> list[float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 6, 32, generator=generator)
        losses.append(float(call(model, optimiser, x)))
    return losses


def train_step(model, optimiser, x):
    optimiser.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimiser.step()
    return loss.detach()


def test_a_model_compiled_inside_an_eager_train_step():
    model, compiled = twins(Stack(2))
    assert train(compiled, train_step) == pytest.approx(train(model, train_step), rel=1e-4)
    assert counts(precisionpass.report(compiled)) == {"attention": 2}


def test_a_whole_compiled_train_step():
    torch._dynamo.reset()
    model = Stack(2)
    expected = train(copy.deepcopy(model), train_step)
    compiled = precisionpass.compile(train_step, backend="aot_eager")
    assert train(model, compiled) == pytest.approx(expected, rel=1e-4)
    report = precisionpass.report(compiled)
    assert counts(report)["attention"] >= 2


def test_torch_compile_with_our_backend_by_name():
    """model.compile(backend="precisionpass") and torch.compile(model, backend="precisionpass")."""
    model, x = Block(), torch.randn(2, 6, 32)
    options = {"backend": "precisionpass", "options": {"rules": "stable-bf16", "backend": "aot_eager"}}
    for compile_ in (lambda m: torch.compile(m, **options), lambda m: (m.compile(**options), m)[1]):
        torch._dynamo.reset()
        ours = step(compile_(copy.deepcopy(model)), (x,))
        theirs = step(model, (x,))
        ours.gradients.update({k.removeprefix("_orig_mod."): ours.gradients.pop(k) for k in list(ours.gradients)})
        same(ours, theirs, 1e-5)


def test_weights_keep_their_names_and_forward_stays_the_models_own():
    model = Stack(1)
    names = list(model.state_dict())
    compiled = precisionpass.compile(model, backend="aot_eager")
    assert compiled is model
    assert list(model.state_dict()) == names
    x = torch.randn(2, 6, 32)
    assert torch.allclose(model.forward(x), compiled(x), atol=1e-5)
