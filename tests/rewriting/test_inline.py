"""Softmaxes and norms inline and as an op: the same numbers, the model's own layout, and what prescale is for."""

import pytest
import torch
from torch.nn import functional

import precisionpass
from precisionpass import Rule
from tests.agreement import at_least_as_good, counts, relative, step

KINDS = ["softmax", "log_softmax", "layer_norm", "rms_norm"]


def rules(**settings):
    return [Rule(id="all", match={"op": KINDS}, apply=settings)]


def softmax(x):
    exponential = (x - x.amax(-1, keepdim=True)).exp()
    return exponential / exponential.sum(-1, keepdim=True)


def layer_norm(x, w=1, b=0):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b


def rms_norm(x, w=0):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + w)


def rms_norm_over_1(x):
    return x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()


def inputs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, w, b = 3 * torch.randn(4, 6, 16) + 1, torch.randn(16), torch.randn(16)
    return tuple(t.to(dtype).requires_grad_() for t in (x, w, b))


CALLS = {
    "softmax": (softmax, 1), "log_softmax": (lambda x: x.log_softmax(-1), 1),
    "layer_norm": (layer_norm, 3), "rms_norm": (rms_norm, 2),
}  # fmt: skip


def targets(call, *args, **settings):
    """What the rewritten graph calls."""
    seen = []

    def backend(module, example):
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    torch._dynamo.reset()
    precisionpass.compile(call, rules=rules(**settings), backend=backend)(*args)
    return " ".join(seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inline_is_as_good_as_the_op(kind, backend):
    call, count = CALLS[kind]
    statistics = ["float64"] if kind == "log_softmax" else ["float32", "float64"]  # its own are FP32 already
    for settings in ({"lowering": "inline", "statistics": one} for one in statistics):
        at_least_as_good(call, *inputs()[:count], rules=rules(**settings), backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_how_a_site_is_lowered(kind):
    call, count = CALLS[kind]
    op = f"precisionpass.{kind}.default"
    given = inputs()[:count]
    assert op in targets(call, *given, lowering="kernel", implementation="auto")
    if kind != "log_softmax":  # whose statistics are in FP32 already, so that no rule below asks for anything
        assert "precisionpass" not in targets(call, *given, implementation="auto")
        assert "precisionpass" not in targets(call, *given, lowering="inline", implementation="auto")


@pytest.mark.parametrize(("device", "is_op"), [("cpu", True), ("meta", False)])
def test_the_reference_of_a_row_is_the_op_on_a_cpu_and_inline_elsewhere(device, is_op):
    given = [t.detach().to(device) for t in inputs()]
    for kind in ("softmax", "layer_norm", "rms_norm"):
        call, count = CALLS[kind]
        assert ("precisionpass" in targets(call, *given[:count], implementation="reference")) is is_op
        assert "precisionpass" in targets(call, *given[:count], lowering="kernel", implementation="auto")


@pytest.mark.parametrize(("dtype", "decision"), [(torch.bfloat16, "rewritten"), (torch.float64, "refused")])
def test_the_kernels_of_rows_are_for_gpus_and_32_bits(dtype, decision):
    (x,) = inputs(dtype)[:1]
    report = precisionpass.explain(softmax, (x.to("meta"),), rules=rules(implementation="triton"))
    assert [site.decision for site in report.sites] == [decision]
    report = precisionpass.explain(softmax, (x,), rules=rules(implementation="triton"))
    assert [(site.decision, site.reason) for site in report.sites] == [("refused", "no_kernel")]


def test_float64_statistics():
    """Nearer to float64 than FP32 can be, for FP32 inputs; an FP32 site is not yet good enough for such a rule."""
    (x,) = inputs(torch.float32)[:1]
    truth = (x.double() * 50).log_softmax(-1)
    compiled = precisionpass.compile(lambda x: (x * 50).log_softmax(-1), rules=rules(statistics="float64"))
    torch._dynamo.reset()
    assert relative(compiled(x), truth) <= relative(truth.float(), truth) * 1.5
    assert counts(precisionpass.report(compiled)) == {"log_softmax": 1}


@pytest.mark.parametrize("size", [1e20, 1e-25])
@pytest.mark.parametrize("lowering", ["kernel", "inline"])
def test_prescale(size, lowering):
    """Squares that overflow or vanish in FP32."""

    def call(x):
        return x * (x.square().mean(-1, keepdim=True)).rsqrt()

    x = size * torch.randn(4, 64)
    truth = call(x.double())
    torch._dynamo.reset()
    compiled = precisionpass.compile(call, rules=rules(prescale=True, lowering=lowering), backend="aot_eager")
    found = step(compiled, (x.requires_grad_(),))
    assert relative(found.outputs[0], truth) < 1e-6 < relative(call(x), truth)
    exact = step(call, (x.detach().double().requires_grad_(),)).gradients["input 0"]
    assert relative(found.gradients["input 0"], exact) < 1e-5


@pytest.mark.parametrize("settings", [{"lowering": "inline"}, {"lowering": "kernel"}], ids=str)
@pytest.mark.parametrize("call", [
    lambda x: softmax(x.transpose(1, 2)).transpose(1, 2).view(4, -1),
    lambda x: layer_norm(x.transpose(1, 2)).transpose(1, 2).view(4, -1),
    lambda x: functional.layer_norm(x.transpose(1, 2), (6,)).view(4, -1),
    lambda x: functional.softmax(x.transpose(1, 2), -1).view(4, -1),
    lambda x: rms_norm_over_1(x).view(4, -1),
    lambda x: rms_norm_over_1(x.mT).mT.view(4, -1),
    lambda x: softmax(x.permute(2, 0, 1)).permute(1, 2, 0).view(-1),
    lambda x: softmax(x[:, :1].expand(4, 6, 16)).view(-1),
])  # fmt: skip
def test_a_view_of_the_result_is_possible_as_before(call, settings):
    x = inputs()[0].detach()
    wanted = {"statistics": "float64"} if settings["lowering"] == "inline" else {"implementation": "auto"}
    torch._dynamo.reset()
    compiled = precisionpass.compile(call, rules=rules(**settings, **wanted), backend="aot_eager")
    assert relative(compiled(x), call(x.double())) < 2**-8
    assert sum(counts(precisionpass.report(compiled)).values()) == 1
