"""Who computes: the kernels where they run and support the call, else the reference; a stand-in shows the seam."""

from types import SimpleNamespace

import pytest
import torch

from precisionpass.ops import attention as module
from precisionpass.reference import attention as reference
from precisionpass.reference import attention_backward as reference_backward

attention = torch.ops.precisionpass.attention


@pytest.fixture
def kernels(monkeypatch):
    """Kernels for the CPU that count their calls, refuse softcap, and hand out one empty tensor several times."""
    calls = []

    def forward(arguments):
        calls.append("forward")
        return reference.forward(arguments)

    def backward(gradients, arguments, saved, collector=None):
        calls.append("backward")
        dq, dk, dv, *_ = reference_backward.backward(gradients, arguments, saved)
        empty = dq.new_empty(0)
        return dq, dk, dv, empty, empty, [empty for _ in arguments.score_inputs]

    stand_in = SimpleNamespace(
        supports=lambda arguments, needs: "no softcap here" if arguments.softcap else None,
        chosen=lambda arguments: ("triton", "no clip here") if arguments.output_clip else ("hopper", None),
        forward=forward,
        backward=backward,
    )
    monkeypatch.setattr(module, "DEVICES", {"triton": ("cpu",)})
    monkeypatch.setattr(module, "triton_kernels", lambda stem: stand_in)
    return calls


def run(**settings):
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output = attention(q, k, v, score_inputs=[torch.ones(1, 1, 1, 1)], **settings)[0]
    return [output, *torch.autograd.grad(output.sum(), (q, k, v))]


def test_the_kernels_compute_what_they_support(kernels):
    results = run(grad_clip=0.5, grad_clip_kind="value")
    assert kernels == ["forward", "backward"]
    assert max(float(part.abs().max()) for part in results[1:]) == 0.5, "clipping comes after every implementation"
    for one, two in zip(results, run(implementation="reference", grad_clip=0.5, grad_clip_kind="value"), strict=True):
        assert torch.equal(one, two)
    assert kernels == ["forward", "backward"]


def test_the_hopper_kernels_are_asked_for_the_forward_and_the_portable_ones_do_the_backward(kernels):
    run(implementation="hopper")
    assert kernels == ["forward", "backward"]
    with pytest.raises(ValueError, match="why: no clip here"):
        run(implementation="hopper", output_clip=1.0)


def test_the_reference_computes_the_rest(kernels):
    run(softcap=3.0)
    assert kernels == []
    with pytest.raises(ValueError, match="why: no softcap here"):
        run(softcap=3.0, implementation="triton")


def test_without_kernels_for_the_device_asking_for_them_is_refused():
    with pytest.raises(ValueError, match="no Triton kernel for this device"):
        run(implementation="triton")
