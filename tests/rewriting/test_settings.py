"""Every setting from a rules file to the numbers it changes, on the CPU: what the result shows, not what is stored."""

import math

import pytest
import torch

import precisionpass
from tests.agreement import relative, step

FILE = "version: 1\nrules:\n- id: r\n  match: {op: OP}\n  apply: {SETTINGS}\n"


@pytest.fixture
def ruled(tmp_path):
    """ruled(call, "delta: output", op="attention", backend="eager"): the compiled call, under a file with one rule."""

    def compiled(call, settings, op="attention", backend="eager"):
        torch._dynamo.reset()
        path = tmp_path / "rules.yaml"
        path.write_text(FILE.replace("OP", op).replace("SETTINGS", settings))
        return precisionpass.compile(call, rules=path, backend=backend)

    return compiled


def attend(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def shown(q, k, v):
    probabilities = (q @ k.mT).softmax(-1)
    return probabilities @ v, probabilities


def by_hand(x):
    """A softmax whose statistics have the dtype of x."""
    exponential = (x - x.amax(-1, keepdim=True)).exp()
    return exponential / exponential.sum(-1, keepdim=True)


def tensors(dtype=torch.float32, size=1.0, length=9):
    torch.manual_seed(0)
    return tuple((size * torch.randn(2, 3, length, 8)).to(dtype).requires_grad_() for _ in range(3))


def ties(length=64):
    """BF16 rows whose maximum stands at many keys, V of one sign: where rounding gets a direction."""
    torch.manual_seed(0)
    q, k = torch.ones(1, 1, length, 8), 3 * torch.ones(1, 1, length, 8)
    v = -(0.5 + torch.rand(1, 1, length, 8))
    return tuple(t.to(torch.bfloat16).requires_grad_() for t in (q, k, v))


def test_logit_clip(ruled):
    q, k, v = tensors(size=4)
    for kind, clip in (("hard", lambda s: s.clamp(-2, 2)), ("tanh", lambda s: 2 * torch.tanh(s / 2))):
        found = ruled(attend, f"logit_clip: {{kind: {kind}, max: 2}}")(q, k, v)
        expected = clip(q @ k.mT / 8**0.5).softmax(-1) @ v
        assert relative(found, expected) < 1e-6 < relative(attend(q, k, v), expected)


def test_output_clip(ruled):
    inputs = tensors()
    found = step(ruled(attend, "output_clip: 0.5"), inputs)
    expected = step(lambda *a: attend(*a).clamp(-0.5, 0.5), inputs)
    assert float(found.outputs[0].abs().max()) == 0.5
    assert relative(found.outputs[0], expected.outputs[0]) < 1e-6
    for name in expected.gradients:  # no gradient where the output stands at the bound
        assert relative(found.gradients[name], expected.gradients[name]) < 1e-5


@pytest.mark.parametrize("kind", ["value", "norm"])
def test_grad_clip(ruled, kind):
    inputs = tensors(size=3)
    free = step(attend, inputs).gradients
    found = step(ruled(attend, f"grad_clip: {{kind: {kind}, max: 0.5}}"), inputs).gradients
    for name, gradient in free.items():
        clipped = gradient.clamp(-0.5, 0.5) if kind == "value" else gradient * min(1, 0.5 / float(gradient.norm()))
        assert relative(gradient, clipped) > 1e-2 > 1e-5 > relative(found[name], clipped)


@pytest.mark.parametrize("way", ["zero", "keep"])
def test_what_becomes_of_gradients_that_are_not_finite(ruled, way):
    q, k, v = tensors()
    settings = f"grad_clip: {{kind: value, max: 0.5, on_nonfinite: {way}}}"
    output = ruled(attend, settings)(q, k, v)
    gradient = torch.ones_like(output)
    gradient[0, 0, 0, 0] = math.inf
    output.backward(gradient)
    assert bool(v.grad.isfinite().all()) is (way == "zero")
    assert float(v.grad[v.grad.isfinite()].abs().max()) <= 0.5


@pytest.mark.parametrize(("way", "value"), [("same", math.nan), ("zero", 0.0), ("nan", math.nan)])
def test_dead_rows(ruled, way, value):
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[4] = False
    found = ruled(attend, f"dead_rows: {way}, implementation: auto")(*tensors(), mask)
    assert torch.equal(found[:, :, 4], torch.full((2, 3, 8), value)) or (found[:, :, 4].isnan().all() and value != 0)
    rest = [row for row in range(9) if row != 4]
    assert relative(found[:, :, rest], attend(*tensors(), mask)[:, :, rest]) < 1e-6


@pytest.mark.parametrize("way", ["same", "never"])
def test_probabilities(ruled, way):
    q, k, v = tensors()
    compiled = ruled(shown, f"implementation: auto, probabilities: {way}")
    assert relative(compiled(q, k, v)[1], shown(q, k, v)[1]) < 1e-6
    (site,) = [s for s in precisionpass.report(compiled).sites if s.kind == "attention"]
    assert (site.decision, site.reason) == (
        ("rewritten", "rewritten") if way == "same" else ("refused", "probabilities_wanted")
    )


@pytest.mark.parametrize("delta", ["residual", "recompute", "output"])
def test_delta(ruled, delta):
    """Rows that attend to equal keys give q no gradient; rowsum(dO * O) of an O rounded down says otherwise."""
    q, k, v = torch.ones(1, 1, 64, 8), 3 * torch.ones(1, 1, 64, 8), torch.ones(1, 1, 64, 8)
    v[:, :, ::2] += 2**-7  # the mean lies halfway between two numbers of BF16, in every column
    q, k, v = (t.to(torch.bfloat16).requires_grad_() for t in (q, k, v))
    ruled(attend, f"delta: {delta}")(q, k, v).backward(torch.full_like(v, 0.3))
    biased = 8 * 0.3 * 2**-8 * 3 / 8**0.5
    assert float(q.grad.mean()) == pytest.approx(biased if delta == "output" else 0, abs=biased / 100)


def test_normaliser(ruled):
    """All probabilities but one are rounded down: divided by their own sum they give V, by the unrounded sum less."""
    q, k, v = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8), torch.ones(1, 1, 64, 8)
    q[..., :2] = 1
    k[:, :, 1:, 0], k[:, :, 1:, 1] = -1.9453125, -0.0045  # exp(score) is a little below 0.502, halfway to BF16's next
    q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    assert torch.equal(ruled(attend, "normaliser: rounded")(q, k, v), v)
    assert float(ruled(attend, "normaliser: float32")(q, k, v).max()) == 1 - 2**-8


@pytest.mark.parametrize(("settings", "near", "shifted"), [
    ("beta: 2, limit: 8", 0.0, 8), ("beta: 1.5, limit: 40", 0.0, 4), ("beta: 2", 0.25, 0),
    ("beta: 2, tolerance: 0.5", 0.25, 8), ("limit: 0", 0.0, 0),
])  # fmt: skip
def test_row_max_shift(ruled, settings, near, shifted):
    """Probabilities are rounded where the bounded shift puts them: exp(s - m - shift), if the maximum of 8 repeats."""
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 64, 16), torch.randn(1, 1, 64, 16), torch.randn(1, 1, 64, 16)
    q[..., 0], k[..., 0], k[:, :, :2, 0] = 4, 5 + 2.5 * torch.rand(1, 1, 64), torch.tensor([8.0, 8.0 - near])
    q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    scores = (q.double() @ k.double().mT) / 4

    def formula(shift):
        rounded = (scores - 8 - shift).exp().to(torch.bfloat16).double()
        return (rounded @ v.double() / rounded.sum(-1, keepdim=True)).to(torch.bfloat16)

    found = ruled(attend, f"row_max_shift: {{{settings}}}")(q, k, v)
    alike = {shift: float((found == formula(shift)).double().mean()) for shift in (0, 4, 8)}
    assert [shift for shift, share in alike.items() if share > 0.98] == [shifted], alike


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_shift_that_a_format_cannot_hold_is_refused_and_not_met_in_the_run(ruled, dtype):
    inputs = tensors(dtype)
    compiled = ruled(attend, "row_max_shift: {limit: 40}")
    compiled(*inputs).sum().backward()
    (site,) = precisionpass.report(compiled).sites
    expected = ("refused", "shift_too_large") if dtype == torch.float16 else ("rewritten", "rewritten")
    assert (site.decision, site.reason) == expected


@pytest.mark.parametrize(
    ("implementation", "op"),
    [
        *((name, op) for name in ("auto", "reference", "triton") for op in ("attention", "softmax")),
        ("hopper", "attention"),
    ],
)
def test_implementation_on_the_cpu(ruled, implementation, op):
    call = attend if op == "attention" else lambda q, k, v: by_hand(k.to(torch.bfloat16))
    inputs = tensors()
    compiled = ruled(call, f"implementation: {implementation}", op)
    compiled(*inputs)
    (site,) = [s for s in precisionpass.report(compiled).sites if s.kind == op]
    assert site.decision == ("refused" if implementation in ("triton", "hopper") else "rewritten")
    assert site.reason == ("no_kernel" if implementation in ("triton", "hopper") else "rewritten")


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_deterministic(ruled, deterministic):
    """The call gets it; on a CPU both give the same bits every time."""
    seen = []

    def backend(module, inputs):
        seen.extend(n.kwargs.get("deterministic", True) for n in module.graph.nodes if "attention" in str(n.target))
        return module

    inputs = tensors(torch.bfloat16)
    compiled = ruled(attend, f"implementation: auto, deterministic: {deterministic}", backend=backend)
    assert torch.equal(compiled(*inputs), compiled(*inputs))
    assert seen == [deterministic == "true"]
