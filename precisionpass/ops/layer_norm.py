"""``torch.ops.precisionpass.layer_norm``: two-pass FP32 statistics, one rounding, a backward of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precisionpass.ops.checks import check_norm, refuse_double_backward, refuse_forward_mode
from precisionpass.ops.implementations import row_kernels
from precisionpass.reference import layer_norm as reference
from precisionpass.reference.rows import statistics_dtype

FLEXIBLE = (torch.Tag.flexible_layout,)
SCHEMA = (
    "(Tensor x, int dims, Tensor? weight, Tensor? bias, float eps, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad_output, Tensor x, int dims, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)"
)


def _forward(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("layer_norm", x)
    check_norm("layer_norm", x, dims, weight, bias)
    if kernels := row_kernels(x, weight, bias, dtype=dtype):
        return kernels.norm_forward(x, dims, weight, bias, eps, 0.0, dtype, center=True)
    return reference.forward(x, dims, weight, bias, eps, dtype)


def _backward(
    grad_output: Tensor,
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("layer_norm_backward", x, grad_output)
    if kernels := row_kernels(x, grad_output, weight, bias):
        return kernels.norm_backward(grad_output, x, dims, weight, bias, mean, rstd, 0.0, tuple(needs))
    return reference.backward(grad_output, x, dims, weight, bias, mean, rstd, tuple(needs))


layer_norm = torch.library.custom_op(
    "precisionpass::layer_norm", _forward, mutates_args=(), schema=SCHEMA, tags=FLEXIBLE
)
layer_norm_backward = torch.library.custom_op(
    "precisionpass::layer_norm_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=FLEXIBLE
)


@layer_norm.register_fake
def _forward_fake(x, dims, weight, bias, eps, dtype=None):
    refuse_forward_mode("layer_norm", x)
    check_norm("layer_norm", x, dims, weight, bias)
    shape = [*x.shape[: x.dim() - dims], *([1] * dims)]
    statistics = statistics_dtype(x.dtype, dtype)
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    return y, x.new_empty(shape, dtype=statistics), x.new_empty(shape, dtype=statistics)


@layer_norm_backward.register_fake
def _backward_fake(grad_output, x, dims, weight, bias, mean, rstd, needs):
    refuse_forward_mode("layer_norm_backward", x, grad_output)
    inputs = zip((x, weight, bias), needs, strict=True)
    return tuple(like.new_empty(like.shape) if needed else x.new_empty(0) for like, needed in inputs)


def _setup_context(ctx, inputs, output) -> None:
    x, ctx.dims, weight, bias, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _autograd_backward(ctx, grad_output, grad_mean, grad_rstd):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    needs = [bool(ctx.needs_input_grad[place]) for place in (0, 2, 3)]
    if grad_output is None:
        return (None,) * len(ctx.needs_input_grad)
    gradients = torch.ops.precisionpass.layer_norm_backward(grad_output, x, ctx.dims, weight, bias, mean, rstd, needs)
    dx, dweight, dbias = (value if needed else None for value, needed in zip(gradients, needs, strict=True))
    return dx, None, dweight, dbias, None, None


layer_norm.register_autograd(_autograd_backward, setup_context=_setup_context)
layer_norm_backward.register_autograd(lambda ctx, *gradients: refuse_double_backward("layer_norm"))
