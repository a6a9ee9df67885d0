"""Whatever goes wrong of ours: the model runs as it is, the review says so, and training state is untouched."""

import copy

import pytest
import torch
from torch import nn

import precisionpass
from precisionpass import PrecisionPassError, pipeline
from tests.agreement import counts, same, step
from tests.small_models import Attention, Stack, family


class State:
    """Everything of a training run that must not change, as bytes and identities."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer):
        self.model, self.optimiser = model, optimiser
        self.before = self.now()

    def now(self) -> dict:
        model = self.model
        return {
            "weights": {name: (id(p), p._version, p.detach().clone()) for name, p in model.named_parameters()},
            "gradients": {name: (id(p.grad), p.grad.clone()) for name, p in model.named_parameters()},
            "buffers": {name: (id(b), b.clone()) for name, b in model.named_buffers()},
            "attributes": {n: {k: id(v) for k, v in m.__dict__.items()} for n, m in model.named_modules()},
            "modes": [m.training for m in model.modules()],
            "optimiser": copy.deepcopy(self.optimiser.state_dict()),
            "rng": torch.get_rng_state(),
            "grad mode": torch.is_grad_enabled(),
        }

    def check(self, *ignored: str) -> None:
        now = self.now()
        for part in self.before.keys() - set(ignored):
            torch.testing.assert_close(now[part], self.before[part], rtol=0, atol=0, msg=part)


def in_training(model: nn.Module, x: torch.Tensor) -> State:
    """A model in the middle of training: gradients, optimiser state and buffers are there."""
    optimiser = torch.optim.AdamW(model.parameters())
    model(x).square().sum().backward()
    optimiser.step()
    return State(model, optimiser)


class Normalised(Stack):
    def __init__(self):
        super().__init__(2, dropout=0.2)
        self.insert(0, nn.BatchNorm1d(5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen = 0

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return super().forward(x)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [None, True, False])
def test_explain_changes_nothing(training):
    model, x = Normalised(), torch.randn(2, 5, 32)
    state = in_training(model, x)
    assert counts(precisionpass.explain(model, (x,), training=training))["attention"] == 2
    state.check()


def test_explain_leaves_arguments_and_a_users_cache_alone():
    model, kwargs = family("llama")
    model.eval()
    model.config.use_cache = True
    with torch.no_grad():
        cache = model(**kwargs).past_key_values
    length, keys = cache.get_seq_length(), cache.layers[0].keys.clone()
    report = precisionpass.explain(
        model, kwargs={"input_ids": kwargs["input_ids"][:, :1], "past_key_values": cache, "use_cache": True}
    )
    assert counts(report)["attention"] == 2
    assert (cache.get_seq_length(), len(cache.layers)) == (length, 2)
    assert torch.equal(cache.layers[0].keys, keys)


def test_explain_leaves_what_modules_hold_alone():
    """Lists, dicts and objects of the user's that the forward changes."""

    class Kept:
        def __init__(self):
            self.lengths = []

    class Remembering(Attention):
        def __init__(self):
            super().__init__()
            self.history, self.table, self.kept = [7], {"n": [0]}, Kept()

        def forward(self, x):
            self.history.append(x.shape[1])
            self.table["n"].append(1)
            self.table["last"] = x
            self.kept.lengths.append(x.shape[1])
            self.kept.last = x
            return super().forward(x)

    model = Remembering()
    held = (model.history, model.table, model.kept)
    precisionpass.explain(model, (torch.randn(2, 5, 32),))
    assert (model.history, model.table) == ([7], {"n": [0]})
    assert vars(model.kept) == {"lengths": []}
    assert all(a is b for a, b in zip(held, (model.history, model.table, model.kept), strict=True))


def test_explain_does_not_write_to_an_argument():
    def call(x, state):
        state.add_(1)
        return x.softmax(-1) + state

    state = torch.zeros(3)
    precisionpass.explain(call, (torch.randn(2, 3), state))
    assert torch.equal(state, torch.zeros(3))


STAGES = ("make_shadow", "find_sites", "decide", "rewrite")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_an_error_of_ours_leaves_the_graph_as_it_is(stage, backend, monkeypatch, caplog):
    model, x = Stack(2), torch.randn(2, 5, 32)
    expected = step(copy.deepcopy(model), (x,))
    state = in_training(copy.deepcopy(model), x)
    monkeypatch.setattr(pipeline, stage, _after(getattr(pipeline, stage)))
    compiled = precisionpass.compile(model, backend=backend)
    same(step(compiled, (x,)), expected, 1e-6)
    report = precisionpass.report(compiled)
    assert report.sites == ()
    assert report.events == ("graph 0 could not be analysed and was left alone: RuntimeError: boom",)
    assert "graph 0 was left alone" in caplog.text
    precisionpass.compile(state.model, backend=backend)
    precisionpass.explain(state.model, (x,))
    state.check("attributes")


def _after(stage):
    """The stage does its work, then fails: the worst moment."""

    def fails(*args):
        stage(*args)
        raise RuntimeError("boom")

    return fails


def test_an_error_half_way_through_a_rewrite_takes_all_of_it_back(monkeypatch):
    """The second of two sites fails: the first is not rewritten either."""
    from precisionpass import rewriting

    real, calls = rewriting.write_attention, []

    def second_fails(*args):
        calls.append(1)
        real(*args)
        if len(calls) == 2:
            raise RuntimeError("boom")

    monkeypatch.setattr(rewriting, "write_attention", second_fails)
    model, x = Stack(2), torch.randn(2, 5, 32)
    expected = step(copy.deepcopy(model), (x,))
    compiled = precisionpass.compile(model, backend="aot_eager")
    same(step(compiled, (x,)), expected, 1e-6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        compiled(x)
    assert not [event.key for event in profiler.key_averages() if event.key.startswith("precisionpass")]


def test_a_model_that_cannot_be_captured():
    class Hopeless(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.softmax(-1), lambda x: x[:1], (x,))

    model = Hopeless()
    with pytest.raises(PrecisionPassError) as raised:
        precisionpass.explain(model, (torch.randn(3, 3),))
    lines = str(raised.value).splitlines()
    assert lines[0] == "PP401 the model could not be captured"
    assert lines[1] == "  where: Hopeless"
    assert lines[2].startswith("  why: ")
    assert len(lines) < 30


def test_the_models_own_error_is_the_models_own():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        precisionpass.explain(Broken(), (torch.randn(3),))
    with pytest.raises(KeyError, match="mine"):
        precisionpass.compile(Broken(), backend="eager")(torch.randn(3))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_formats_that_are_none_of_ours(dtype):
    """Weights in a format that no op computes: the model runs as torch runs it."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8).to(dtype), requires_grad=False)

        def forward(self, x):
            if dtype is torch.complex64:
                scores = (x.to(dtype) @ self.weight) @ x.to(dtype).mT
                return scores.abs().softmax(-1).to(dtype) @ x.to(dtype)
            y = x @ self.weight.to(torch.float32)
            return (y @ x.mT).softmax(-1) @ x

    model, x = Odd(), torch.randn(2, 5, 8)
    expected = model(x)
    compiled = precisionpass.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    assert precisionpass.report(compiled).events == ()


def test_a_call_that_fails_in_the_users_code_leaves_training_state_alone():
    model, x, wrong = Normalised(), torch.randn(2, 5, 32), torch.randn(2, 5, 31)
    state = in_training(model, x)
    with pytest.raises(PrecisionPassError, match="could not be captured"):
        precisionpass.explain(model, (wrong,))
    state.check()


def test_the_recompile_limit_is_told_in_our_words():
    model = precisionpass.compile(Attention(), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3), pytest.warns(UserWarning, match="recompile_limit") as caught:
        for length in range(3, 9):
            model(torch.randn(2, length, 32))
    assert len([w for w in caught if "without the rewrite" in str(w.message)]) == 1
    report = precisionpass.report(model)
    assert report.graphs == 3
    *again, event = report.events
    assert again == [f"graph {number} is graph 0 compiled again, for other inputs" for number in (1, 2)]
    assert event.startswith("compiled 3 times for different inputs: torch stops at 3 (recompile_limit)")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: precisionpass.compile(m, backend="nope"), "PP408 torch.compile has no backend 'nope'"),
        (lambda m, x: precisionpass.explain(m, x), "PP407 args is one tensor, not a tuple of arguments"),
    ],
)
def test_mistakes_in_a_call_are_answered_at_once(call, message):
    model, x = Stack(1), torch.randn(2, 5, 32)
    with pytest.raises(PrecisionPassError) as raised:
        call(model, x)
    assert str(raised.value).splitlines()[0] == message
    assert "\n  fix: " in str(raised.value)
    assert not precisionpass.is_active(model)
