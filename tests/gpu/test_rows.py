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
    if name in check_rows.SUMS:
        assert check_rows.check(name, dtype, "cuda", center, residual=True) < 1
    assert check_rows.check(name, dtype, "cuda", center) < 1


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", check_rows.SOFTMAXES)
def test_softmaxes_agree_with_float64(name, dtype, log):
    assert check_rows.check_softmax(name, dtype, "cuda", log) < 1.5


@pytest.mark.parametrize("columns", [1, 7, 1000, 4096, 40000])
def test_a_float32_softmax_is_off_by_four_units_and_the_rounding_of_its_argument(columns):
    """Eager rounds x - max as well; a row of -inf, or with +inf or NaN, is NaN in both."""
    x = 5 * torch.randn(max(2**18 // columns, 4), columns, generator=torch.Generator().manual_seed(0))
    x[1], x[2, 0], x[3, -1] = -torch.inf, torch.inf, torch.nan
    found = OPS.softmax(x.cuda(), -1).cpu().double()
    truth, below = x.double().softmax(-1), x.double() - x.double().amax(-1, keepdim=True)
    assert torch.equal(found.isnan(), truth.isnan())
    finite = truth.isfinite()
    limit = truth * (4 * 2.0**-23 + 2.0**-24 * below.abs()) + 2.0**-140
    assert bool(((found - truth).abs() <= limit)[finite].all())
    scaled = (x[:2].nan_to_num(0.0, 1.0, -1.0).round() * 1e14).cuda()
    torch.testing.assert_close(OPS.softmax(scaled, -1), torch.softmax(scaled, -1), rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 333, 20000])
def test_rows_that_are_not_finite_vanish_or_overflow_are_as_eager(columns, dtype):
    x = torch.randn(10, columns, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    x[0, 0], x[1, -1], x[2, 0], x[3], x[4] = torch.inf, -torch.inf, torch.nan, 0.0, 2.5
    x *= torch.tensor([1.0] * 5 + [1e-30, 1e-19, 1e18, 1e19, 1e30])[:, None]
    x = x.to("cuda", dtype)
    for eager, op in (
        (torch.nn.functional.layer_norm(x, (columns,)), OPS.layer_norm(x, 1, None, None, 1e-5)[0]),
        (torch.nn.functional.rms_norm(x, (columns,), eps=1e-5), OPS.rms_norm(x, 1, None, None, 1e-5)[0]),
    ):
        # Where squares overflow, eager's LayerNorm is NaN; this one is 0.
        assert bool((op.isfinite() | ~eager.isfinite()).all())
        finite = eager.isfinite()
        torch.testing.assert_close(op[finite], eager[finite], rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


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


@pytest.mark.parametrize("columns", [100, 768, 4096, 12000, 20000])
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
    total, y, _, _ = OPS.add_norm(x, x, 1, None, None, 1e-5, True)
    (total + y).sum().backward()
    assert launched == [*["norm_forward", "norm_backward"] * 2, "softmax_forward", "softmax_backward",
                        "norm_forward", "norm_backward"]  # fmt: skip


def test_strided_rows_are_read_where_they_are():
    x = torch.randn(64, 3, 512, device="cuda")[:, 1]
    found = OPS.layer_norm(x, 1, None, None, 1e-5)[0]
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, [512]), rtol=1e-5, atol=1e-5)
