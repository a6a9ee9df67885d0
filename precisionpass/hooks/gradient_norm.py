"""A global gradient norm in FP32 that fails at once where a gradient is not finite; right under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from precisionpass.errors import PrecisionPassError

if distributed.is_available():
    from torch.distributed.tensor import DTensor


def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = True
) -> Tensor:
    """Scale all gradients down, in place, so that their Euclidean norm together is at most `max_norm`.

    parameters: a module, whose names an error uses, or tensors. Gradients of any float dtype; under FSDP2 they are
    DTensors, and every rank calls this. Returns the norm before, a scalar: FP32 for each gradient, whatever its dtype,
    and FP64 over them, so that no 16-bit sum loses or overflows. `torch.nn.utils.clip_grad_norm_` sums BF16 gradients
    in BF16. max_norm=inf measures, and changes nothing.
    Raises PrecisionPassError (PP502), the gradients as they were, where the norm of one is inf or nan; this waits for
    the device. error_if_nonfinite=False does not wait, and leaves the gradients as they are there.
    """
    if not max_norm > 0:
        raise PrecisionPassError(f"max_norm is {max_norm}", where="precisionpass.clip_grad_norm_", code="PP502",
                                 why="a norm is positive", fix="for example max_norm=1.0")  # fmt: skip
    named = _named(parameters)
    gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0, dtype=torch.float64)
    device = _local(gradients[0]).device
    squares = torch.stack([_square(gradient).to(device) for gradient in gradients])
    total = squares.sum().sqrt()
    if error_if_nonfinite and not bool(total.isfinite()):
        names = [name for name, parameter in named if parameter.grad is not None]
        wrong = [name for name, square in zip(names, squares.isfinite().tolist(), strict=True) if not square]
        raise PrecisionPassError(
            f"the norm of the gradient of {wrong[0]} is not finite", where="precisionpass.clip_grad_norm_",
            why=f"{len(wrong)} of {len(names)} gradients are not; scaling would spread it over all of them",
            fix="skip the step, or look at the loss scale and at on_nonfinite", code="PP502",
        )  # fmt: skip
    scale = torch.where(total.isfinite() & (total > max_norm), max_norm / total, 1.0)
    for gradient in gradients:
        part = _local(gradient)
        part.mul_(scale.to(part.device, torch.float32))
    return total


def _named(parameters: nn.Module | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [(f"parameter {number}", tensor) for number, tensor in enumerate(tensors)]


def _local(gradient: Tensor) -> Tensor:
    """The part of a gradient that lies on this rank."""
    return gradient.to_local() if is_sharded(gradient) else gradient


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, as FSDP2 makes of parameters and their gradients."""
    return distributed.is_available() and isinstance(tensor, DTensor)


def _square(gradient: Tensor) -> Tensor:
    """The square of a gradient's norm over all ranks, FP64; FP32 (FP64 for FP64 gradients) within."""
    local = _local(gradient)
    square = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32)).double().square()
    if is_sharded(gradient):
        for dimension, placement in enumerate(gradient.placements):
            if placement.is_partial():
                raise PrecisionPassError("a gradient is a partial sum", where="precisionpass.clip_grad_norm_",
                                         code="PP502", fix="redistribute it first")  # fmt: skip
            if placement.is_shard():
                distributed.all_reduce(square, group=gradient.device_mesh.get_group(dimension))
    return square
