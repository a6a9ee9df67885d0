"""escalate: from the rules to a run that meets a sink, takes the safer settings, and goes back."""

import logging

import pytest
import torch
from torch import nn

import precisionpass
from precisionpass.errors import PrecisionPassError
from precisionpass.hooks.escalation import Escalation
from precisionpass.hooks.figures import ROWS
from precisionpass.hooks.totals import empty
from precisionpass.numerics import generators
from precisionpass.numerics.generators import SCALE, WIDTH
from precisionpass.rules.groups import figures_of

WHEN = '"delta_bias_t > 6 and delta_bias > 1e-5"'
RULES = """version: 1
rules:
- id: fused
  match: {op: attention}
  apply: {normaliser: float32, delta: DELTA, ESCALATE}
"""
ESCALATE = f"escalate: {{when: {WHEN}, to: {{delta: recompute, normaliser: rounded}}, hold: 12}}"
RATE, SINK = 1e-5, range(100, 110)  # steps that are fed a persistent sink; 32 sequences a step, so 4 to a window


class Head(nn.Module):
    """q = q0 + x W, and attention."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, case_q, x, k, v):
        q = (case_q + (x @ self.weight).unsqueeze(1)).to(k.dtype)
        return ((q @ k.mT).float() * SCALE).softmax(-1).to(v.dtype) @ v


@pytest.fixture
def head(tmp_path):
    def compiled(delta="output", escalate=ESCALATE, **options):
        torch._dynamo.reset()
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.replace("DELTA", delta).replace("ESCALATE", escalate))
        return precisionpass.compile(Head(), rules=path, **({"backend": "eager"} | options))

    return compiled


def train(model, steps):
    """SGD; W after each step, in FP64."""
    weights = []
    for step in steps:
        case = (generators.persistent_sink if step in SINK else generators.normal)(0, step)
        model(case.q.float(), case.x.float(), case.k, case.v).backward(case.upstream)
        with torch.no_grad():
            model.weight -= RATE * model.weight.grad
        model.weight.grad = None
        weights.append(model.weight.detach().double().clone())
    return weights


def drift(ours, exact):
    return float(torch.linalg.matrix_norm(ours - exact, ord=2))


def changes(model):
    return [(event.step, event.escalated) for event in precisionpass.monitor(model).events]


def test_a_run_that_meets_a_sink_escalates_drifts_no_further_and_goes_back(head, caplog):
    steps = range(92, 124)
    exact, biased = (train(head(delta, "implementation: auto"), steps) for delta in ("recompute", "output"))
    model = head()
    with caplog.at_level(logging.WARNING, "precisionpass"):
        weights = train(model, steps)
    # 8 calm steps; the window of steps 100 to 103 tells; 12 steps later back, with calm inputs again.
    assert changes(model) == [(12, True), (24, False)]
    first, second = precisionpass.monitor(model).events
    assert first.message.startswith("delta_bias_t > 6 and delta_bias > 1e-5 (delta_bias 7.15e-05, delta_bias_t ")
    assert first.message.endswith("delta=recompute, normaliser=rounded for 12 steps")
    assert second.message == "back after 12 steps: delta=recompute, normaliser=rounded ends"
    assert [record.getMessage() for record in caplog.records if "at step" in record.getMessage()] == [
        f"{event.site} at step {event.step}: {event.message}" for event in (first, second)
    ]
    assert precisionpass.report(model).events[-1].endswith(f"at step 24: {second.message}")
    told, after = 11, len(SINK) + 7  # the last step before the change, the last one with a sink
    at_change, in_the_end = (drift(weights[step], exact[step]) for step in (told, after))
    assert 0 < at_change and abs(in_the_end - at_change) < 0.1 * at_change
    assert drift(biased[after], exact[after]) > 2 * at_change


@pytest.mark.parametrize("saved", [2, 10, 14])
def test_a_run_goes_on_from_a_checkpoint_as_it_would_have(head, saved):
    """Saved in the middle of a window, of one that will tell, and while escalated."""
    whole, part = head(), None
    start, stop = 92, 120
    expected = train(whole, range(start, stop))
    part = head()
    train(part, range(start, start + saved))
    state = {"model": part.state_dict(), "monitor": precisionpass.monitor(part).state_dict()}
    resumed = head()
    resumed.load_state_dict(state["model"])
    precisionpass.monitor(resumed).load_state_dict(state["monitor"])
    found = train(resumed, range(start + saved, stop))
    assert all(torch.equal(one, two) for one, two in zip(found, expected[saved:], strict=True))
    assert changes(resumed) == changes(whole) != []
    assert precisionpass.monitor(resumed).read() == precisionpass.monitor(whole).read()


def test_it_works_through_inductor_and_changes_nothing_while_calm(head, no_cached_backward):
    free, calm = (head("output", escalate, backend="inductor") for escalate in ("implementation: auto", ESCALATE))
    for one, two in zip(train(free, range(92, 96)), train(calm, range(92, 96)), strict=True):
        assert torch.equal(one, two)
    train(calm, range(100, 104))
    assert changes(calm) == [(8, True)]


def test_fp8_while_calm(head):
    """The other way round: the rule says FP8, and the figures end it."""
    fp8 = "matmul: {qk: fp8_e4m3}, implementation: reference"
    model = head("recompute", f'{fp8}, escalate: {{when: "max_logit > 8", to: {{matmul: "off"}}, hold: 3, window: 32}}')
    case = generators.persistent_sink(0, 0)
    inputs = (case.q.float(), case.x.float(), case.k, case.v)
    first = model(*inputs)
    first.backward(case.upstream)
    second = model(*inputs)
    assert changes(model) == [(1, True)] and not torch.equal(first, second)
    torch._dynamo.reset()
    assert torch.equal(second, head("recompute", "implementation: reference")(*inputs))


@pytest.mark.parametrize(
    ("escalate", "wrong"),
    [
        ("{when: delta_bis > 1, to: {delta: recompute}}", 'PP108 .*"delta_bis"; did you mean "delta_bias"'),
        ("{when: seq_q > 1, to: {delta: recompute}}", 'PP108 .*unknown fact "seq_q"'),
        ("{when: entropy > 1, to: {delta: output}}", 'PP105 "output" is no choice for "delta"'),
        ("{when: entropy > 1, to: {logit_clip: {kind: hard, max: 1}}}", 'PP103 unknown key "logit_clip"'),
        ("{when: entropy > 1, to: {}}", "PP106 .*to sets nothing"),
        ("{to: {delta: recompute}}", 'PP106 missing key "when"'),
    ],
)
def test_what_cannot_be_meant_is_refused(head, escalate, wrong):
    with pytest.raises(PrecisionPassError, match=wrong):
        head(escalate=f"escalate: {escalate}")


def test_settings_that_would_contradict_each_other_once_escalated_are_refused(head):
    model = head(escalate='escalate: {when: "entropy > 1", to: {row_max_shift: {}}}')
    train(model, range(1))
    (site,) = (site for site in precisionpass.report(model).sites if site.kind == "attention")
    assert (site.decision, site.reason) == ("refused", "contradiction")
    assert "once escalated, row_max_shift needs normaliser" in site.message


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"backend": "cudagraphs"}]
)
def test_cuda_graphs_cannot_escalate(head, options):
    with pytest.raises(PrecisionPassError, match="PP404 escalate does not work with CUDA graphs"):
        head(**({"backend": "inductor"} | options))


def test_a_state_that_no_site_has_taken_yet_is_kept(head):
    first = head()
    train(first, range(1))
    state = precisionpass.monitor(first).state_dict()
    waiting = precisionpass.monitor(head())
    waiting.load_state_dict(state)
    again = waiting.state_dict()["escalations"]
    assert [one["steps"] for one in again.values()] == [one["steps"] for one in state["escalations"].values()] == [1]


def test_a_figure_that_nothing_records_here_is_told_once(caplog):
    escalation = Escalation(figures_of("entropy < 1"), {"delta": "recompute"}, "delta=recompute", hold=2, window=2)
    call = empty(1)
    call[ROWS.index("sequences")] = call[ROWS.index("rows")] = 2  # as GPU kernels: no score is seen once more
    with caplog.at_level(logging.WARNING, "precisionpass"):
        assert [escalation.after_step("attn", ["entropy"], call, 2) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "attn: escalate cannot ask for entropy: nothing records it here"
    ]
