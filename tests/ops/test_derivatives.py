"""Derivatives the ops do not have are refused by name: a zero tangent would be a silent mistake."""

import pytest
import torch
from torch.autograd import forward_ad

import precisionpass.ops  # noqa: F401

ops = torch.ops.precisionpass
OPS = {
    "attention": lambda x: ops.attention(x, x, x, save_residual=True)[0],
    "softmax": lambda x: ops.softmax(x, -1),
    "log_softmax": lambda x: ops.log_softmax(x, -1),
    "layer_norm": lambda x: ops.layer_norm(x, 1, None, None, 1e-5)[0],
    "rms_norm": lambda x: ops.rms_norm(x, 1, None, None, 1e-5)[0],
}


@pytest.fixture
def x():
    return torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", OPS)
def test_torch_func_jvp_is_refused(name, x):
    with pytest.raises(RuntimeError, match=rf"precisionpass::{name} has no forward-mode derivative"):
        torch.func.jvp(OPS[name], (x,), (x,))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_dual_tensor_is_refused(name, grad, x):
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=rf"precisionpass::{name} has no forward-mode derivative"),
    ):
        OPS[name](forward_ad.make_dual(x.requires_grad_(grad), torch.ones_like(x)))


@pytest.mark.parametrize("name", OPS)
def test_jvp_inside_a_compiled_function_is_refused(name, x):
    compiled = torch.compile(lambda x: torch.func.jvp(OPS[name], (x,), (x,)), backend="aot_eager")
    with pytest.raises(Exception, match="forward-mode derivative"):
        compiled(x)


@pytest.mark.parametrize("name", OPS)
def test_double_backward_is_refused_but_create_graph_alone_is_not(name, x):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(OPS[name](x).square().sum(), x, create_graph=True)
    assert bool(gradient.isfinite().all())
    with pytest.raises(RuntimeError, match=rf"precisionpass::{name} has no second derivative"):
        torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize("name", OPS)
def test_vmap_is_right_or_raises(name, x):
    batch = torch.stack([x, 2 * x, -x])
    try:
        result = torch.vmap(OPS[name])(batch)
    except RuntimeError as error:
        assert "atching rule" in str(error) or "vmap" in str(error)
    else:
        torch.testing.assert_close(result, torch.stack([OPS[name](part) for part in batch]))


@pytest.mark.parametrize("name", OPS)
def test_torch_func_grad_is_right_or_raises(name, x):
    try:
        result = torch.func.grad(lambda x: OPS[name](x).square().sum())(x)
    except RuntimeError as error:
        assert "setup_context" in str(error)
    else:
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(result, torch.autograd.grad(OPS[name](leaf).square().sum(), leaf)[0])
