"""Packed sequences: what their cu_seqlens must be, and attention of nested tensors, which are packed already."""

from __future__ import annotations

import torch
from torch import Tensor

from precisionpass.ops.arguments import AttentionArguments
from precisionpass.ops.checks import ArgumentError, DtypeError


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, **settings: object) -> Tensor:
    """Attention of nested tensors of the jagged layout, as SDPA takes them; nothing is copied or padded.

    q [N, H, ragged, D], k [N, Hk, ragged, D], v [N, Hk, ragged, Dv] (heads split by ``unflatten`` and ``transpose``);
    k and v have the same lengths, q may have others. Gives [N, H, ragged, Dv] with q's lengths. ``settings``: those of
    ``torch.ops.precisionpass.attention``. Raises ArgumentError for another layout.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not _is_jagged_by_head(tensor):
            raise ArgumentError(
                f"jagged_attention: {name} is not a nested [N, heads, ragged, width] without holes",
                where=name,
                why="it is read as torch.nested lays it out for scaled_dot_product_attention",
                fix="torch.nested.nested_tensor(..., layout=torch.jagged), then unflatten and transpose the heads",
            )
    rows, keys = (tensor.offsets().to(torch.int32) for tensor in (q, k))
    parts = (tensor.values().unsqueeze(0) for tensor in (q, k, v))
    output, *_ = torch.ops.precisionpass.attention(*parts, cu_seqlens_q=rows, cu_seqlens_k=keys, **settings)
    return torch.nested.nested_tensor_from_jagged(output.squeeze(0), q.offsets(), jagged_dim=2)


def _is_jagged_by_head(tensor: Tensor) -> bool:
    if tensor.layout != torch.jagged or tensor.dim() != 4 or tensor.lengths() is not None:
        return False
    return tensor.shape[1] == tensor.values().shape[0]  # else it is the ragged size, which equals no number


BOTH = ("cu_seqlens_q", "cu_seqlens_k")


def check_packed_formats(arguments: AttentionArguments) -> None:
    """Both or neither, int32, one-dimensional, on q's device. Raises ArgumentError, DtypeError."""
    given = [name for name in BOTH if getattr(arguments, name) is not None]
    if len(given) == 1:
        raise ArgumentError(
            f"attention: {given[0]} is given alone",
            where=given[0],
            why="a packed sequence has rows and keys",
            fix="pass cu_seqlens_q and cu_seqlens_k; in self-attention they are the same tensor",
        )
    for name in given:
        tensor: Tensor = getattr(arguments, name)
        if tensor.dtype != torch.int32:
            raise DtypeError(
                f"attention: {name} is {str(tensor.dtype).removeprefix('torch.')}",
                where=name,
                why="the kernels read int32",
                fix=f"{name}.to(torch.int32)",
            )
        if tensor.dim() != 1 or tensor.device != arguments.q.device:
            raise ArgumentError(
                f"attention: {name} has {tensor.dim()} dimensions and is on {tensor.device}",
                where=name,
                why="it is one row of numbers on the device of q, which nobody reads back",
                fix=f"one dimension, on {arguments.q.device}",
            )


def check_packed_sizes(arguments: AttentionArguments) -> None:
    """A batch of one and equal counts; on the CPU the numbers themselves as well. Raises ArgumentError."""
    if not arguments.packed:
        return
    if arguments.q.shape[0] != 1:
        raise ArgumentError(
            f"attention: packed sequences in a batch of {arguments.q.shape[0]}",
            where="q",
            why="they stand one after the other in q [1, H, total, D]",
            fix="flatten the batch into the rows, or leave cu_seqlens out",
        )
    counts = [len(getattr(arguments, name)) for name in BOTH]
    if counts[0] != counts[1] or not counts[0]:
        raise ArgumentError(
            f"attention: cu_seqlens_q and cu_seqlens_k have {counts[0]} and {counts[1]} numbers",
            where="cu_seqlens_q, cu_seqlens_k",
            why="each sequence has a beginning in both, and the last an end",
            fix="sequences + 1 numbers in each; a sequence without rows or keys repeats its beginning",
        )
    for name, length in zip(BOTH, (arguments.q.shape[2], arguments.k.shape[2]), strict=True):
        tensor: Tensor = getattr(arguments, name)
        if tensor.device.type == "cpu":
            _check_values(name, tensor.tolist(), length)


def _check_values(name: str, bounds: list[int], length: int) -> None:
    if bounds[0] != 0 or bounds[-1] > length or sorted(bounds) != bounds:
        raise ArgumentError(
            f"attention: {name} does not ascend from 0 to at most {length}",
            where=name,
            why="sequence n ends where sequence n + 1 begins",
            fix="torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)",
        )
