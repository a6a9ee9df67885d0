"""Regions that torch captures in their own way: each is right, rewritten where it can be and left alone where not."""

import functools

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precisionpass
from tests.agreement import against_eager, counts, reasons, same, step
from tests.small_models import Attention, Block, Stack


def attend(q, k, v):
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def qkv(*shape: int, count: int = 3) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape, requires_grad=True) for _ in range(count))


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.0):
        super().__init__()
        self.blocks, self.reentrant = Stack(2, dropout=dropout), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_bodies_are_rewritten(reentrant, backend):
    x = torch.randn(2, 7, 32, requires_grad=True)
    report = against_eager(Checkpointed(reentrant), (x,), backend=backend, rewritten={"attention": 2})
    assert all("." in site.graph for site in report.sites), "the sites are in child graphs"


@pytest.mark.parametrize("rules", ["stable-bf16", "watch"])
def test_a_checkpoint_around_a_compiled_model(rules):
    """It counts what the forward saves: what the pass tries out while it compiles is none of it."""
    torch._dynamo.reset()
    model, x = precisionpass.compile(Stack(1), rules=rules, backend="aot_eager"), torch.randn(2, 7, 32)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        model(x[:1, :3]).sum().backward()
    checkpoint(model, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_a_checkpoint_draws_the_same_mask_again(backend):
    """The gradient by finite differences along it: a different mask in the recomputation would not agree."""
    torch._dynamo.reset()
    model = Checkpointed(reentrant=False, dropout=0.4).double()
    compiled = precisionpass.compile(model, backend=backend)
    x, direction = torch.randn(2, 6, 32, dtype=torch.float64), torch.randn(2, 6, 32, dtype=torch.float64)

    def value(point):
        torch.manual_seed(3)
        return compiled(point).square().sum()

    x.requires_grad_()
    value(x).backward()
    with torch.no_grad():
        slope = (value(x + 1e-6 * direction) - value(x - 1e-6 * direction)) / 2e-6
    assert torch.isclose((x.grad * direction).sum(), slope, rtol=1e-5)
    assert counts(precisionpass.report(compiled))["attention"] >= 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [None, torch.bfloat16, False])
def test_a_checkpoint_within_an_autocast_region(inner, reentrant):
    """The body's graph stands on its own: it must be read under the region that it is called in."""

    def body(q, k, v):
        if inner is None:
            return attend(q, k, v)
        with torch.autocast("cpu", inner or torch.bfloat16, enabled=bool(inner)):
            return checkpoint(attend, q, k, v, use_reentrant=reentrant)

    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            first = checkpoint(body, q, k, v, use_reentrant=reentrant)
        return first, checkpoint(attend, q, k, v, use_reentrant=reentrant)

    report = against_eager(call, qkv(2, 3, 5, 8), tolerance=2e-2, rewritten={"attention": 2})
    assert [site.facts["dtype"] for site in report.sites] == ["fp32" if inner is False else "bf16", "fp32"]


def test_a_checkpoint_within_no_grad():
    def call(q, k, v):
        with torch.no_grad():
            first = checkpoint(attend, q, k, v, use_reentrant=False)
        return first * checkpoint(attend, q, k, v, use_reentrant=False)

    inputs = tuple(t.detach().bfloat16().requires_grad_() for t in qkv(2, 3, 5, 8))
    report = against_eager(call, inputs, tolerance=2e-2, rewritten={"attention": 2})
    bodies = [report.artifacts[f"graph_0.{n}.after.py"] for n in (0, 1)]
    assert ["save_residual=True" in body for body in bodies] == [False, True], "only where a gradient is wanted"


def test_branches_are_rewritten_each_on_its_own():
    class Branching(torch.nn.Module):
        def forward(self, flag, q, k, v):
            return torch.cond(flag, attend, lambda q, k, v: 2 * attend(k, q, v), (q, k, v))

    for flag in (True, False):
        inputs = (torch.tensor(flag), *qkv(2, 3, 5, 8))
        against_eager(Branching(), inputs, rewritten={"attention": 2}, training=False)


def test_vmap_is_left_alone_and_what_follows_it_is_found():
    def call(q, k, v):
        inner = torch.vmap(attend)(q, k, v)
        return attend(inner, k, v)

    against_eager(call, qkv(2, 3, 5, 8), rewritten={"attention": 1})


def test_func_grad_is_left_alone_and_what_follows_it_is_found():
    def call(q, k, v):
        slope = torch.func.grad(lambda q: attend(q, k, v).square().sum())(q)
        return attend(slope, k, v)

    against_eager(call, qkv(2, 3, 5, 8), rewritten={"attention": 1}, training=False)


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16, None])
def test_nested_autocast(inner):
    """The formats inside and outside of a nested region are the model's own."""
    model = Stack(2)

    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.first(x)
                with torch.autocast("cpu", inner or torch.bfloat16, enabled=inner is not None):
                    x = self.second(x)
                return x, self.first.attention.qkv(x)

    report = against_eager(Nested(), (torch.randn(2, 6, 32),), tolerance=2e-2, rewritten={"attention": 2})
    formats = [site.facts["dtype"] for site in report.sites if site.kind == "attention"]
    assert formats == ["bf16", "fp32" if inner in (None, torch.float32) else "bf16"]


def test_autocast_around_the_compiled_model():
    model, x = Stack(1), torch.randn(2, 6, 32)
    expected = functools.partial(step, args=(x,))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = expected(model)
        report_of = precisionpass.compile(model, backend="aot_eager")
        same(expected(report_of), theirs, 2e-2)
    (site,) = [site for site in precisionpass.report(model).sites if site.kind == "attention"]
    assert site.facts["dtype"] == "bf16"


def test_no_grad_regions():
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            with torch.no_grad():
                seen = self.first(x)
            return self.second(x) + seen

    against_eager(Halves(), (torch.randn(2, 6, 32, requires_grad=True),), rewritten={"attention": 2})


def test_gradients_switched_off_within_a_site():
    """Detached in eager means detached here: no gradient reaches q and k."""

    def call(q, k, v):
        with torch.no_grad():
            probabilities = (q @ k.transpose(-2, -1)).softmax(-1)
        return probabilities @ v

    report = against_eager(call, qkv(2, 3, 5, 8))
    assert "grad_mode_changes" in reasons(report)


def test_a_detached_score_passes_no_gradient():
    def call(q, k, v):
        return (q @ k.transpose(-2, -1)).detach().softmax(-1) @ v

    against_eager(call, qkv(2, 3, 5, 8))


def test_inference_mode():
    model = Stack(1).eval()
    x = torch.randn(2, 6, 32)
    torch._dynamo.reset()
    theirs = model(x)
    precisionpass.compile(model, backend="aot_eager")
    with torch.inference_mode():
        ours = model(x)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert counts(precisionpass.report(model)) == {"attention": 1}


def test_inference_and_training_match_the_same_sites():
    model, x = Attention(), torch.randn(2, 6, 32)
    training = against_eager(model, (x,), rewritten={"attention": 1})
    inference = against_eager(model.eval(), (x,), rewritten={"attention": 1}, training=False)
    assert [site.formula for site in training.sites] == [site.formula for site in inference.sites]


def test_a_softmax_between_gradient_modes_of_sdpa():
    def call(q, k, v):
        with torch.enable_grad():
            first = functional.scaled_dot_product_attention(q, k, v)
        with torch.no_grad():
            second = functional.scaled_dot_product_attention(q, k, v)
        return first + second

    against_eager(call, qkv(2, 3, 5, 8), rewritten={"attention": 2})
