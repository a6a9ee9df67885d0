"""grad_clip at softmaxes and norms: the gradient of the input alone, whatever computes the site."""

import pytest
import torch
from torch import nn

import precisionpass
from precisionpass.errors import PrecisionPassError
from tests.agreement import relative

KINDS = {
    "softmax": lambda x: (3 * x).softmax(-1),
    "log_softmax": lambda x: (3 * x).log_softmax(-1),
    "layer_norm": lambda x: nn.functional.layer_norm(x * 3, (8,), WEIGHT, None, 1e-5),
    "rms_norm": lambda x: nn.functional.rms_norm(x * 3, (8,), WEIGHT, 1e-5),
}
WEIGHT = torch.linspace(0.5, 2, 8).requires_grad_()


def inputs():
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradients(call, upstream=None):
    x = inputs()
    output = call(x)
    upstream = torch.linspace(-1, 1, output.numel()).view_as(output) if upstream is None else upstream
    return torch.autograd.grad(output, (x, WEIGHT), upstream, allow_unused=True)


def compiled(kind, apply, backend="aot_eager"):
    torch._dynamo.reset()
    rule = precisionpass.Rule(id="r", match=precisionpass.Match(op=kind), apply=apply)
    return precisionpass.compile(KINDS[kind], rules=[rule], backend=backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowering", ["inline", "kernel"])
@pytest.mark.parametrize("how", ["value", "norm"])
def test_the_gradient_of_the_input_is_clipped_and_no_other(kind, lowering, how):
    free, weight = gradients(KINDS[kind])
    inside = free / 3  # the site's own input is 3 x
    bound = 0.25 * float(inside.abs().max() if how == "value" else inside.norm())
    expected = 3 * (inside.clamp(-bound, bound) if how == "value" else inside * (bound / inside.norm()))
    apply = {"lowering": lowering, "grad_clip": {"kind": how, "max": bound}}
    found, found_weight = gradients(compiled(kind, apply))
    assert relative(free, expected) > 1e-2 > 1e-5 > relative(found, expected)
    if weight is not None:
        assert relative(found_weight, weight) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_not_finite_is_zeroed_under_every_backend(backend):
    upstream = torch.ones(4, 6, 8)
    upstream[1, 2, 3] = torch.inf
    apply = {"grad_clip": {"kind": "value", "max": 1e30, "on_nonfinite": "zero"}}
    assert bool(gradients(compiled("softmax", apply, backend), upstream)[0].isfinite().all())


def test_inference_has_nothing_to_clip():
    call = compiled("layer_norm", {"grad_clip": {"kind": "value", "max": 1e-3}})
    with torch.no_grad():
        assert relative(call(inputs()), KINDS["layer_norm"](inputs())) < 1e-6
    assert "clip_gradient" not in precisionpass.report(call).artifacts["graph_0.after.py"]


def test_raising_belongs_to_attention():
    clip = {"kind": "value", "max": 1.0, "on_nonfinite": "raise"}
    with pytest.raises(PrecisionPassError, match='"grad_clip" with these values belongs to "attention", and the'):
        compiled("softmax", {"grad_clip": clip})
