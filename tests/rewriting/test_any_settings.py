"""Whatever may be written together: the site is rewritten, kept or refused, and no run meets an error of an op's.

PRECISIONPASS_MUTATIONS=10000 tries a thousand combinations; 25 otherwise.
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import dropout, scaled_dot_product_attention

import precisionpass
from precisionpass import PrecisionPassError, Rule
from precisionpass.rules.settings import belongs_to

EXAMPLES = max(25, int(os.environ.get("PRECISIONPASS_MUTATIONS", "0")) // 10)
CHOICES = {
    "implementation": ["auto", "reference", "keep", "triton", "hopper"],
    "lowering": ["auto", "inline", "kernel"],
    "deterministic": [True, False],
    "statistics": ["float32", "float64"],
    "prescale": [True, False],
    "normaliser": ["rounded", "float32"],
    "delta": ["residual", "recompute", "output"],
    "matmul": ["off", {"qk": "fp8_e4m3"}, {"pv": "fp8_e5m2", "scale": "row"}, {"qk": "fp8_e4m3", "pv": "fp8_e4m3"}],
    "on_missing_fp8": ["refuse", "bf16"],
    "row_max_shift": ["off", {"beta": 2.0}, {"limit": 40.0, "beta": 100.0}, {"limit": 0.0, "tolerance": 1.0}],
    "logit_clip": ["off", {"kind": "hard", "max": 1e-3}, {"kind": "tanh", "max": 1e6}],
    "output_clip": ["off", 0.5, 1e30],
    "grad_clip": ["off", {"kind": "value", "max": 1e-3}, {"kind": "norm", "max": 1e30, "on_nonfinite": "zero"}],
    "record": ["off", ["delta_bias", "row_sum", "max_logit"], ["repeated_maxima", "entropy", "clipped", "amax"]],
    "escalate": ["off", {"when": "entropy > 1", "to": {"delta": "recompute"}, "hold": 1, "window": 2}],
    "dead_rows": ["same", "zero", "nan"],
    "probabilities": ["same", "never"],
}
ROWS = ["softmax", "log_softmax", "layer_norm", "rms_norm"]


def settings_of(*ops):
    """Any of the settings that sites of these kinds have."""
    names = [name for name in CHOICES if set(ops) & set(belongs_to(name))]
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(CHOICES[name]) for name in names})


DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])


def attention(q, k, v, mask, *, called, causal, masked, softcap, dropped, shown):
    if called:
        mask = mask if masked else None
        return scaled_dot_product_attention(q, k, v, mask, 0.1 * dropped, is_causal=causal and mask is None)
    scores = q @ k.mT / 8**0.5
    scores = 5 * torch.tanh(scores / 5) if softcap else scores
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf) if causal else scores
    scores = scores.masked_fill(~mask, -torch.inf) if masked else scores
    probabilities = scores.softmax(-1)
    output = dropout(probabilities, 0.1 * dropped) @ v
    return (output, probabilities) if shown else output


def row(x, kind):
    """A softmax or norm by hand, in the dtype of x."""
    if kind == "softmax":
        exponential = (x - x.amax(-1, keepdim=True)).exp()
        return exponential / exponential.sum(-1, keepdim=True)
    if kind == "log_softmax":
        return x.log_softmax(-1)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-3).rsqrt()


def runs(call, inputs, op, chosen, backend):
    try:
        rules = [Rule(id="r", match={"op": op}, apply=chosen)]
    except PrecisionPassError as error:
        assert error.code in ("PP106", "PP112")
        return
    torch._dynamo.reset()
    compiled = precisionpass.compile(call, rules=rules, backend=backend)
    output = compiled(*inputs)
    first = output[0] if isinstance(output, tuple) else output
    first.float().sum().backward()
    report = precisionpass.report(compiled)
    assert [site.kind for site in report.sites] == [op] and report.events == ()


anything = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
flags = st.fixed_dictionaries(
    {name: st.booleans() for name in ("called", "causal", "masked", "softcap", "dropped", "shown")}
)


@anything
@given(settings_of("attention"), DTYPES, flags, st.sampled_from(["eager", "aot_eager"]))
def test_attention(chosen, dtype, kind, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.rand(1, 1, 5, 5) > 0.3
    runs(lambda *inputs: attention(*inputs, **kind), (q, k, v, mask), "attention", chosen, backend)


@anything
@given(settings_of(*ROWS), DTYPES, st.sampled_from(ROWS), st.booleans())
def test_rows(chosen, dtype, kind, turned):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 8).to(dtype).requires_grad_()
    runs(lambda x: row(x.mT if turned else x, kind), (x,), kind, chosen, "aot_eager")
