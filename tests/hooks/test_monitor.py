"""record from a rules file to precisionpass.monitor, through torch.compile, and `watch`, which changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import precisionpass
from precisionpass.errors import PrecisionPassError

RECORD = "version: 1\nrules:\n- {id: r, match: {op: attention}, apply: {APPLY}}\n"


class Attention(nn.Module):
    """fused: through scaled_dot_product_attention; else written out."""

    def __init__(self, fused, dropout=0.0):
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fused, self.dropout = fused, nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = self.dropout(((q @ k.mT) * 8**-0.5).masked_fill(later, -torch.inf).softmax(-1)) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self, fused=False, dropout=0.0):
        super().__init__()
        self.first, self.second = Attention(fused, dropout), Attention(fused, dropout)

    def forward(self, x):
        return self.second(self.first(x))


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def rules(tmp_path):
    def written(apply):
        path = tmp_path / "rules.yaml"
        path.write_text(RECORD.replace("APPLY", apply))
        return path

    return written


def inputs(dtype=torch.float32, sequences=4):
    return torch.randn(sequences, 16, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def step(model, x):
    """Output and gradients of one step."""
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_watch_changes_no_bit(fused, dtype, backend, no_cached_backward):
    model, x = Model(fused).to(dtype), inputs(dtype)
    found = {}
    for rules in ("off", "watch"):
        torch._dynamo.reset()
        precisionpass.compile(model, rules=rules, backend=backend)
        found[rules] = step(model, x)
    assert all(torch.equal(one, two) for one, two in zip(found["off"], found["watch"], strict=True))
    figures = precisionpass.monitor(model).read()
    assert list(figures) == ["first", "second"] and figures["first"] != figures["second"]
    assert all(site["sequences"] == 4 and "delta_bias" in site for site in figures.values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("apply", ["implementation: auto", "implementation: keep"])
def test_a_forward_that_is_computed_again_is_counted_once(rules, apply, backend):
    model = precisionpass.compile(Checkpointed(), rules=rules(f"record: [max_logit], {apply}"), backend=backend)
    step(model, inputs())
    step(model, inputs())
    assert {name: site["sequences"] for name, site in precisionpass.monitor(model).read().items()} == {
        "first": 8, "second": 8,
    }  # fmt: skip


@pytest.mark.parametrize("apply", ["implementation: auto", "implementation: keep"])
def test_other_inputs_and_inference_go_on_with_the_same_totals(rules, apply):
    model = precisionpass.compile(Model(), rules=rules(f"record: [amax, nonfinite], {apply}"), backend="aot_eager")
    monitor = precisionpass.monitor(model)
    assert monitor.read() == {}, "nothing has been captured"
    step(model, inputs())
    step(model, inputs(sequences=3))
    model(inputs())  # no backward: not counted
    assert monitor.read()["first"]["sequences"] == 7
    with torch.no_grad():
        model(inputs())
    assert monitor.read()["first"]["sequences"] == 11 and monitor.check() == []


def test_two_models_do_not_mix(rules):
    path = rules("record: [amax]")
    one, two = (precisionpass.compile(Model(), rules=path, backend="eager") for _ in range(2))
    step(one, inputs())
    step(two, 8 * inputs())
    amax = [precisionpass.monitor(model).read()["first"]["amax_q"] for model in (one, two)]
    assert amax[1] > 2 * amax[0] > 0


def test_a_copy_records_once_it_is_compiled(rules):
    path = rules("record: [amax]")
    model = precisionpass.compile(Model(), rules=path, backend="eager")
    step(model, inputs())
    with pytest.warns(UserWarning, match="a copy of a compiled model is not compiled"):
        other = copy.deepcopy(model)
    with pytest.raises(PrecisionPassError, match="PP405") as refused:
        precisionpass.monitor(other)
    assert refused.value.where == "precisionpass.monitor"
    precisionpass.compile(other, rules=path, backend="eager")
    step(other, inputs())
    assert precisionpass.monitor(other).read() == precisionpass.monitor(model).read()


def test_the_models_own_dropout_leaves_out_the_bias(rules):
    model = precisionpass.compile(Model(dropout=0.5), rules=rules("record: [delta_bias, max_logit]"), backend="eager")
    step(model, inputs())
    assert set(precisionpass.monitor(model).read()["first"]) == {"sequences", "max_logit", "max_logit_by_head"}
    torch._dynamo.reset()
    both = rules("record: [delta_bias, max_logit], delta: recompute")
    step(precisionpass.compile(model, rules=both, backend="eager"), inputs())
    assert precisionpass.monitor(model).read()["first"]["delta_bias"] < 1e-5


def test_the_review_says_what_is_recorded(rules):
    report = precisionpass.explain(Model(), (inputs(),), rules=rules("record: [amax, entropy]"))
    site = report.sites[0]
    assert (site.decision, site.reason) == ("kept", "recorded") and site.settings["record"]["value"] == (
        "amax", "entropy",
    )  # fmt: skip
    assert "precisionpass.observe" in report.artifacts["graph_0.after.py"]


def test_an_output_that_cannot_be_followed_is_said_not_to_be_recorded(rules):
    attend = nn.MultiheadAttention(32, 4, batch_first=True)
    call = lambda x: attend(x, x, x, need_weights=False)[0]  # noqa: E731
    (site,) = precisionpass.explain(call, (inputs(),), rules=rules("record: [amax]")).sites
    assert (site.decision, site.reason) == ("kept", "not_recorded")
    assert site.message.endswith("its figures cannot be recorded: its output is inside another call")


@pytest.mark.parametrize(("apply", "decision"), [("implementation: keep", "kept"), ("delta: recompute", "rewritten")])
def test_an_exported_program_records_nothing_and_says_so(rules, apply, decision):
    program = torch.export.export(Model(), (inputs(),))
    rewritten = precisionpass.rewrite(program, rules=rules(f"record: [amax], {apply}"))
    for site in precisionpass.report(rewritten).sites:
        assert site.decision == decision
        assert site.message.endswith("recorded: nobody can read them from an exported program")
    assert "record" not in rewritten.graph_module.code


def test_what_record_may_not_name(rules):
    with pytest.raises(
        PrecisionPassError, match=r'PP105 "amx" is no choice for "record" in rule "r"; did you mean "amax"'
    ):
        precisionpass.explain(Model(), (inputs(),), rules=rules("record: [amx]"))
    off = precisionpass.explain(Model(), (inputs(),), rules=rules("record: off"))
    assert {site.reason for site in off.sites} == {"rule_keeps"}
