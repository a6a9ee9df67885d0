"""``torch.ops.precisionpass.rms_norm``: FP32 statistics, one rounding, a backward of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precisionpass.ops.checks import check_norm, refuse_double_backward, refuse_forward_mode
from precisionpass.ops.implementations import row_kernels
from precisionpass.reference import rms_norm as reference
from precisionpass.reference.rows import statistics_dtype

FLEXIBLE = (torch.Tag.flexible_layout,)
SCHEMA = (
    "(Tensor x, int dims, Tensor? weight, Tensor? bias, float eps, float weight_offset=0.0, bool prescale=False, "
    "ScalarType? dtype=None) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad_output, Tensor x, int dims, Tensor? weight, Tensor? bias, Tensor rstd, float weight_offset, "
    "bool[] needs) -> (Tensor, Tensor, Tensor)"
)


def _forward(
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    prescale: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_forward_mode("rms_norm", x)
    check_norm("rms_norm", x, dims, weight, bias)
    kernels = row_kernels(x, weight, bias, dtype=dtype)
    if kernels and not prescale:
        y, _, rstd = kernels.norm_forward(x, dims, weight, bias, eps, weight_offset, dtype, center=False)
        return y, rstd
    return reference.forward(x, dims, weight, bias, eps, weight_offset, prescale, dtype)


def _backward(
    grad_output: Tensor,
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("rms_norm_backward", x, grad_output)
    if kernels := row_kernels(x, grad_output, weight, bias):
        return kernels.norm_backward(
            grad_output, x, dims, weight, bias, None, rstd, weight_offset, tuple(needs)
        )
    return reference.backward(grad_output, x, dims, weight, bias, rstd, weight_offset, tuple(needs))


rms_norm = torch.library.custom_op("precisionpass::rms_norm", _forward, mutates_args=(), schema=SCHEMA, tags=FLEXIBLE)
rms_norm_backward = torch.library.custom_op(
    "precisionpass::rms_norm_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=FLEXIBLE
)


@rms_norm.register_fake
def _forward_fake(x, dims, weight, bias, eps, weight_offset=0.0, prescale=False, dtype=None):
    refuse_forward_mode("rms_norm", x)
    check_norm("rms_norm", x, dims, weight, bias)
    shape = [*x.shape[: x.dim() - dims], *([1] * dims)]
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    return y, x.new_empty(shape, dtype=statistics_dtype(x.dtype, dtype))


@rms_norm_backward.register_fake
def _backward_fake(grad_output, x, dims, weight, bias, rstd, weight_offset, needs):
    refuse_forward_mode("rms_norm_backward", x, grad_output)
    inputs = zip((x, weight, bias), needs, strict=True)
    return tuple(like.new_empty(like.shape) if needed else x.new_empty(0) for like, needed in inputs)


def _setup_context(ctx, inputs, output) -> None:
    x, ctx.dims, weight, bias, _, ctx.weight_offset, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, output[1])


def _autograd_backward(ctx, grad_output, grad_rstd):
    x, weight, bias, rstd = ctx.saved_tensors
    needs = [bool(ctx.needs_input_grad[place]) for place in (0, 2, 3)]
    if grad_output is None:
        return (None,) * len(ctx.needs_input_grad)
    gradients = torch.ops.precisionpass.rms_norm_backward(
        grad_output, x, ctx.dims, weight, bias, rstd, ctx.weight_offset, needs
    )
    dx, dweight, dbias = (value if needed else None for value, needed in zip(gradients, needs, strict=True))
    return dx, None, dweight, dbias, None, None, None, None


rms_norm.register_autograd(_autograd_backward, setup_context=_setup_context)
rms_norm_backward.register_autograd(lambda ctx, *gradients: refuse_double_backward("rms_norm"))
