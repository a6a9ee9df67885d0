"""Norms and softmaxes on a GPU: the kernels' cases, past 2^31 elements, the same bits twice, through the ops."""

import pytest
import torch

import precisionpass.ops  # noqa: F401  registers torch.ops.precisionpass
from precisionpass.kernels import rows
from tests.kernels import check_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPS = torch.ops.precisionpass


@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", check_rows.CASES)
def test_norms_agree_with_float64(name, dtype, center):
    if dtype != torch.float32 and check_rows.CASES[name][4] > 100:
        pytest.skip("16 bits do not hold such a row")
    assert check_rows.check(name, dtype, "cuda", center) < 1


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", check_rows.SOFTMAXES)
def test_softmaxes_agree_with_float64(name, dtype, log):
    assert check_rows.check_softmax(name, dtype, "cuda", log) < 1.5


@pytest.mark.parametrize("columns", [2**16, 1000])
def test_past_two_to_the_31_elements(columns):
    """The last rows of a large tensor are those of a small one."""
    count = 2**31 // columns + 5
    x = torch.empty(count, columns, dtype=torch.bfloat16, device="cuda").normal_()
    end = x[-3:].clone()
    for op in (lambda t: OPS.layer_norm(t, 1, None, None, 1e-5)[0], lambda t: OPS.softmax(t, -1)):
        assert torch.equal(op(x)[-3:], op(end))
    gradient = x.flip(0)
    _, mean, rstd = OPS.layer_norm(x, 1, None, None, 1e-5)
    dx, _, _ = rows.norm_backward(gradient, x, 1, None, None, mean, rstd, 0.0, (True, False, False))
    few = rows.norm_backward(gradient[-3:].clone(), end, 1, None, None, mean[-3:], rstd[-3:], 0.0, (True, False, False))
    assert torch.equal(dx[-3:], few[0])


@pytest.mark.parametrize("columns", [768, 4096, 20000])
def test_the_same_inputs_give_the_same_bits(columns):
    x, gradient = (torch.randn(3000, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(columns, device="cuda").requires_grad_() for _ in range(2))
    x.requires_grad_()

    def gradients():
        return torch.autograd.grad(OPS.layer_norm(x, 1, weight, bias, 1e-5)[0], (x, weight, bias), gradient)

    first = gradients()
    assert all(torch.equal(one, two) for _ in range(3) for one, two in zip(first, gradients(), strict=True))


def test_the_ops_run_the_kernels(monkeypatch):
    launched = []
    launch = rows.launch

    def note(kernel, *arguments, **constants):
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(rows, "launch", note)
    x = torch.randn(8, 256, device="cuda", requires_grad=True)
    OPS.layer_norm(x, 1, None, None, 1e-5)[0].sum().backward()
    OPS.rms_norm(x, 1, None, None, 1e-6)[0].sum().backward()
    OPS.softmax(x, -1).sum().backward()
    assert launched == ["norm_forward", "norm_backward"] * 2 + ["softmax_forward", "softmax_backward"]


def test_strided_rows_are_read_where_they_are():
    x = torch.randn(64, 3, 512, device="cuda")[:, 1]
    found = OPS.layer_norm(x, 1, None, None, 1e-5)[0]
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, [512]), rtol=1e-5, atol=1e-5)
