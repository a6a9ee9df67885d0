"""``torch.ops.precisionpass.add_norm``: a residual sum and the LayerNorm or RMSNorm of it, as one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precisionpass.ops.checks import ArgumentError, check_norm, refuse_double_backward, refuse_forward_mode
from precisionpass.ops.implementations import row_kernels
from precisionpass.reference import layer_norm, rms_norm
from precisionpass.reference.rows import statistics_dtype

FLEXIBLE = (torch.Tag.flexible_layout,)
SCHEMA = (
    "(Tensor x, Tensor residual, int dims, Tensor? weight, Tensor? bias, float eps, bool center, "
    "float weight_offset=0.0, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad_output, Tensor? grad_total, Tensor total, int dims, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd, bool center, float weight_offset, bool[] needs) -> (Tensor, Tensor, Tensor)"
)


def _check(x: Tensor, residual: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None) -> None:
    refuse_forward_mode("add_norm", x)
    check_norm("add_norm", x, dims, weight, bias)
    if residual.dtype != x.dtype or residual.dim() != x.dim():
        raise ArgumentError(
            f"add_norm: residual is {residual.dtype} of {residual.dim()} dimensions, x {x.dtype} of {x.dim()}",
            where="residual",
            why="the sum is formed in their common format, element by element",
            fix="add them before, and call layer_norm or rms_norm",
        )


def _forward(
    x: Tensor,
    residual: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, residual, dims, weight, bias)
    if x.shape != residual.shape:
        raise ArgumentError(
            f"add_norm: x {list(x.shape)} and residual {list(residual.shape)} differ",
            where="residual",
            why="nothing is broadcast",
            fix="expand it",
        )
    if kernels := row_kernels(x, weight, bias, dtype=dtype):
        return kernels.add_norm_forward(x, residual, dims, weight, bias, eps, weight_offset, dtype, center=center)
    total = torch.add(x, residual).contiguous()
    if center:
        return total, *layer_norm.forward(total, dims, weight, bias, eps, dtype)
    y, rstd = rms_norm.forward(total, dims, weight, bias, eps, weight_offset, False, dtype)
    return total, y, rstd.new_empty(0), rstd


def _backward(
    grad_output: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    center: bool,
    weight_offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("add_norm_backward", total, grad_output)
    parts = (tuple(needs), grad_total)
    if kernels := row_kernels(total, grad_output, grad_total, weight, bias):
        of = mean if center else None
        return kernels.norm_backward(grad_output, total, dims, weight, bias, of, rstd, weight_offset, *parts)
    if center:
        return layer_norm.backward(grad_output, total, dims, weight, bias, mean, rstd, *parts)
    return rms_norm.backward(grad_output, total, dims, weight, bias, rstd, weight_offset, *parts)


add_norm = torch.library.custom_op("precisionpass::add_norm", _forward, mutates_args=(), schema=SCHEMA, tags=FLEXIBLE)
add_norm_backward = torch.library.custom_op(
    "precisionpass::add_norm_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=FLEXIBLE
)


@add_norm.register_fake
def _forward_fake(x, residual, dims, weight, bias, eps, center, weight_offset=0.0, dtype=None):
    _check(x, residual, dims, weight, bias)
    shape = [*x.shape[: x.dim() - dims], *([1] * dims)]
    statistics = statistics_dtype(x.dtype, dtype)
    total, y = (torch.empty(x.shape, dtype=kind or x.dtype, device=x.device) for kind in (None, dtype))
    mean = x.new_empty(shape if center else [0], dtype=statistics)
    return total, y, mean, x.new_empty(shape, dtype=statistics)


@add_norm_backward.register_fake
def _backward_fake(
    grad_output, grad_total, total, dims, weight, bias, mean, rstd, center, weight_offset, needs
):
    refuse_forward_mode("add_norm_backward", total, grad_output)
    inputs = zip((total, weight, bias), needs, strict=True)
    return tuple(like.new_empty(like.shape) if needed else total.new_empty(0) for like, needed in inputs)


def _setup_context(ctx, inputs, output) -> None:
    _, _, ctx.dims, weight, bias, _, ctx.center, ctx.weight_offset, _ = inputs
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, weight, bias, mean, rstd)


def _autograd_backward(ctx, grad_total, grad_output, grad_mean, grad_rstd):
    total, weight, bias, mean, rstd = ctx.saved_tensors
    of_x, of_residual, of_weight, of_bias = (bool(ctx.needs_input_grad[place]) for place in (0, 1, 3, 4))
    needs = [of_x or of_residual, of_weight, of_bias]
    dx, dweight, dbias = grad_total, None, None
    if grad_output is not None:
        gradients = torch.ops.precisionpass.add_norm_backward(
            grad_output, grad_total, total, ctx.dims, weight, bias, mean, rstd, ctx.center, ctx.weight_offset, needs
        )
        dx, dweight, dbias = (value if needed else None for value, needed in zip(gradients, needs, strict=True))
    return dx if of_x else None, dx if of_residual else None, None, dweight, dbias, None, None, None, None


add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)
add_norm_backward.register_autograd(lambda ctx, *gradients: refuse_double_backward("add_norm"))
