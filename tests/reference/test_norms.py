"""LayerNorm and RMSNorm against FP64: values, gradients, hard rows, empty shapes."""

import pytest
import torch
from torch import Tensor

import precisionpass.ops  # noqa: F401
from precisionpass.numerics.budgets import NORM

layer_norm, rms_norm = torch.ops.precisionpass.layer_norm, torch.ops.precisionpass.rms_norm


def exact_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def exact_rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float) -> Tensor:
    over = tuple(range(-len(shape), 0))
    y = x * (x.square().mean(over, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * (weight + 1.0)
    return y if bias is None else y + bias


NORMS = {
    "layer_norm": (lambda x, w, b, dims, eps, **more: layer_norm(x, dims, w, b, eps, **more)[0], exact_layer),
    "rms_norm": (lambda x, w, b, dims, eps, **more: rms_norm(x, dims, w, b, eps, 1.0, **more)[0], exact_rms),
    "rms_norm prescaled": (
        lambda x, w, b, dims, eps, **more: rms_norm(x, dims, w, b, eps, 1.0, True, **more)[0],
        exact_rms,
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("parameters", [(None, None), (torch.float32, None), (torch.bfloat16, torch.float32)])
def test_values_and_gradients(name, dtype, dims, parameters):
    op, exact = NORMS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, 5, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
    shape = x.shape[3 - dims :]
    parts = [
        None if kind is None else torch.randn(shape, generator=generator).to(kind).requires_grad_()
        for kind in parameters
    ]
    wide = [None if part is None else part.detach().double().requires_grad_() for part in (x, *parts)]
    result, truth = op(x, *parts, dims, 1e-5), exact(*wide, shape, 1e-5)
    upstream = torch.randn(truth.shape, generator=generator).to(dtype)
    inputs, wide = ([part for part in group if part is not None] for group in ((x, *parts), wide))
    gradients = torch.autograd.grad(result, inputs, upstream)
    truths = torch.autograd.grad(truth, wide, upstream.double())
    assert result.dtype == dtype and result.is_contiguous()
    for value, known in zip((result, *gradients), (truth, *truths), strict=True):
        # One rounding to the tensor's own format and FP32's few over sums of up to 200 terms.
        limit = torch.finfo(value.dtype).eps / 2 + (1e-6 if dtype != torch.float64 else 1e-13)
        size = known.abs().clamp(min=1.0)
        assert bool(((value.double() - known).abs() <= limit * size * (1 if value is result else 2)).all()), name


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", ["both", "sum", "norm"])
def test_a_norm_of_a_sum_gives_both(name, dtype, used):
    """The sum is the model's own, and the gradient that comes through it is added before the one rounding."""
    generator = torch.Generator().manual_seed(0)
    x, residual, of_sum, of_norm = (torch.randn(6, 40, generator=generator).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_(), residual.requires_grad_(), torch.randn(40, generator=generator).requires_grad_()]
    settings = (1, leaves[2], None, 1e-5, name == "layer_norm", 0.0 if name == "layer_norm" else 1.0)
    total, y, _, _ = torch.ops.precisionpass.add_norm(x, residual, *settings)
    assert torch.equal(total, x + residual)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_total = wide[0] + wide[1] + (total.double() - wide[0] - wide[1]).detach()  # its rounding, not its gradient's
    truth = NORMS[name][1](exact_total, wide[2], None, (40,), 1e-5)
    results, truths = {"both": ((total, y), (exact_total, truth)), "sum": ((total,), (exact_total,)),
                       "norm": ((y,), (truth,))}[used]  # fmt: skip
    upstream = (of_sum, of_norm) if used == "both" else (of_sum if used == "sum" else of_norm,)
    found = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
    known = torch.autograd.grad(truths, wide, [g.double() for g in upstream], allow_unused=True)
    assert (found[2] is None) == (known[2] is None) == (used == "sum")
    for value, exact in ((y, truth), *zip(found, known, strict=True)):
        if exact is not None:
            limit = torch.finfo(value.dtype).eps / 2 + (2e-6 if dtype != torch.float64 else 1e-13)
            assert bool(((value.double() - exact).abs() <= limit * exact.abs().clamp(min=1.0) * 2).all())


@pytest.mark.parametrize("ratio", [0.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_large_mean_costs_its_own_rounding_only(name, dtype, ratio):
    """NUMERICS 7: E[x^2] - E[x]^2 is off by 6e-4 at 100, 5 % at 1000, NaN at 1e4. 16 bits may hold no deviation."""
    op, exact = NORMS[name]
    x = (torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) + ratio).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    result, truth = op(x, None, None, 1, 1e-5), exact(wide, None, None, (512,), 1e-5)
    upstream = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    (gradient,) = torch.autograd.grad(result, x, upstream)
    (known,) = torch.autograd.grad(truth, wide, upstream.double())
    off_centre = wide.mean(1, keepdim=True).abs() / (wide.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    for value, goal in ((result, truth), (gradient, known)):
        limit = NORM * (1 + off_centre) + torch.finfo(dtype).eps / 2 * goal.abs()
        assert bool(((value.double() - goal).abs() <= limit * known.abs().amax().clamp(min=1.0)).all())


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_that_fp32_squares_do_not_reach_are_as_eager(name, dtype):
    """From 1e19 on the norm is 0 without prescale. Eager's LayerNorm is NaN from 1e30 on; this where means overflow."""
    row = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    x = (row * torch.tensor([[1e-30], [1e-19], [1e18], [1e19], [1e30], [3e38]])).to(dtype)
    over = torch.nn.functional
    eager = over.layer_norm(x, (64,)) if name == "layer_norm" else over.rms_norm(x, (64,), eps=1e-5)
    found = NORMS[name][0](x, None, None, 1, 1e-5)
    finite = eager.isfinite()
    assert bool(finite[:4].all() and found[:5].isfinite().all())
    torch.testing.assert_close(found[finite], eager[finite], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("row", [lambda: torch.randn(8, 512) + 2000, lambda: 0.01 * torch.randn(8, 512) + 100])
def test_off_centre_rows_of_the_field(row):
    """CASES 11: others are off by 771, or wrong; mean / std is 2000 and 10 000, so the budget is 2e-3 and 1e-2."""
    torch.manual_seed(0)
    x = row()
    wide = x.double()
    error = (layer_norm(x, 1, None, None, 1e-5)[0] - exact_layer(wide, None, None, (512,), 1e-5)).abs().max()
    assert float(error) <= 1e-3


def test_rms_norm_of_small_bfloat16_with_the_eps_of_float32():
    """CASES 10: with the eps of BF16 (2^-7) the result is off by 1.7x."""
    x = (0.058 * torch.randn(16, 32, generator=torch.Generator().manual_seed(0))).bfloat16()
    eps = torch.finfo(torch.float32).eps
    truth = exact_rms(x.double(), None, None, (32,), eps)
    error = (rms_norm(x, 1, None, None, eps)[0].double() - truth).abs() / truth.abs().clamp(min=1e-6)
    assert float(error.max()) <= 2.0**-8


def test_large_float16_rows_are_finite():
    """CASES 12: 4096 squares of 8000 overflow FP16 4e6 times over."""
    x = (8000 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).sign()).half().requires_grad_()
    result = rms_norm(x, 1, None, None, 1e-6)[0]
    torch.testing.assert_close(result.float(), x.detach().float() / 8000, rtol=2.0**-11, atol=0)
    assert bool(torch.autograd.grad(result.sum(), x)[0].isfinite().all())


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e19, 1e30, 3e38])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_prescaling_reaches_every_magnitude(size, eps):
    """Without it FP32 gives 0 from 1e19 on, without a word."""
    unit = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    x = (size * unit).requires_grad_()
    truth = exact_rms(x.detach().double(), None, None, (64,), eps)
    result = rms_norm(x, 1, None, None, eps, 1.0, True)[0]
    torch.testing.assert_close(result.double(), truth, rtol=2e-6, atol=0)
    assert bool(torch.autograd.grad(result.sum(), x)[0].isfinite().all())
    if size >= 1e30:
        assert not rms_norm(x, 1, None, None, eps)[0].any()


@pytest.mark.parametrize("name", NORMS)
def test_rows_that_are_not_finite_are_as_eager(name):
    op, _ = NORMS[name]
    x = torch.randn(5, 8)
    x[0, 3], x[1, 2], x[2, 1], x[3] = torch.inf, -torch.inf, torch.nan, 0.0
    over = torch.nn.functional
    eager = over.layer_norm(x, (8,)) if name == "layer_norm" else over.rms_norm(x, (8,), eps=1e-5)
    torch.testing.assert_close(op(x, None, None, 1, 1e-5), eager, equal_nan=True)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (1, 1), (8,), (2, 0)])
def test_small_and_empty_shapes(name, shape):
    op, exact = NORMS[name]
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1:], requires_grad=True)
    result = op(x, weight, None, 1, 1e-5)
    assert result.shape == x.shape
    if x.numel():
        truth = exact(x.double(), weight.double(), None, shape[-1:], 1e-5)
        torch.testing.assert_close(result.double(), truth, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(result.sum(), (x, weight))
    assert [part.shape for part in gradients] == [x.shape, weight.shape]


def test_the_statistics_are_float32_whatever_the_input():
    x = torch.randn(3, 4, 8).bfloat16()
    _, mean, rstd = layer_norm(x, 2, None, None, 1e-5)
    assert mean.dtype == rstd.dtype == torch.float32 and mean.shape == rstd.shape == (3, 1, 1)
    assert rms_norm(x, 1, None, None, 1e-5)[1].shape == (3, 4, 1)
    assert layer_norm(x, 1, None, None, 1e-5, torch.float32)[0].dtype == torch.float32


@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_a_parameters_gradient_adds_up_in_float32(op):
    """2^14 rows: a BF16 sum would stop growing at 256."""
    x = torch.ones(2**14, 2, dtype=torch.bfloat16)
    weight, bias = (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    result = op(x, 1, weight, bias, 1e-5)[0]
    assert torch.autograd.grad(result.sum(), bias)[0].tolist() == [2.0**14] * 2
