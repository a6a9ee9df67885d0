"""``torch.ops.precisionpass.softmax`` and ``log_softmax``: FP32 statistics, one rounding, a backward of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from precisionpass.ops.checks import check_float, refuse_double_backward, refuse_forward_mode
from precisionpass.ops.implementations import row_kernels
from precisionpass.reference import softmax as reference

SCHEMA = "(Tensor x, int dim, ScalarType? dtype=None) -> Tensor"
BACKWARD_SCHEMA = "(Tensor grad_output, Tensor x, Tensor? output, int dim) -> Tensor"


def _define(name: str, compute: Callable[..., Tensor], compute_backward: Callable[..., Tensor]):
    def forward(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        refuse_forward_mode(name, x)
        check_float(name, x=x)
        if kernels := row_kernels(x, dtype=dtype):
            return kernels.softmax_forward(x, dim, dtype, log=name == "log_softmax")
        return compute(x, dim, dtype)

    def forward_fake(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        refuse_forward_mode(name, x)
        check_float(name, x=x)
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def backward(grad_output: Tensor, x: Tensor, output: Tensor | None, dim: int) -> Tensor:
        refuse_forward_mode(f"{name}_backward", x, grad_output)
        if kernels := row_kernels(x, grad_output):
            return kernels.softmax_backward(grad_output, x, dim, log=name == "log_softmax")
        return compute_backward(grad_output, x, output, dim)

    def backward_fake(grad_output: Tensor, x: Tensor, output: Tensor | None, dim: int) -> Tensor:
        refuse_forward_mode(f"{name}_backward", x, grad_output)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def setup_context(ctx, inputs, output) -> None:
        x, ctx.dim, _ = inputs
        rounded = output.dtype in (torch.bfloat16, torch.float16)
        ctx.save_for_backward(x, None if rounded else output)

    def autograd_backward(ctx, grad_output):
        x, output = ctx.saved_tensors
        operation = getattr(torch.ops.precisionpass, f"{name}_backward")
        return operation(grad_output, x, output, ctx.dim), None, None

    flexible = (torch.Tag.flexible_layout,)
    op = torch.library.custom_op(f"precisionpass::{name}", forward, mutates_args=(), schema=SCHEMA, tags=flexible)
    op.register_fake(forward_fake)
    op_backward = torch.library.custom_op(
        f"precisionpass::{name}_backward", backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=flexible
    )
    op_backward.register_fake(backward_fake)
    op.register_autograd(autograd_backward, setup_context=setup_context)
    op_backward.register_autograd(lambda ctx, gradient: refuse_double_backward(name))
    return op, op_backward


softmax, softmax_backward = _define("softmax", reference.softmax, reference.softmax_backward)
log_softmax, log_softmax_backward = _define("log_softmax", reference.log_softmax, reference.log_softmax_backward)
