"""How the reference walks over an attention: whole rows of some heads at a time, without the keys no row may see.

The cut changes memory and speed, never a number: every row is computed over all the keys it may attend to, at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.reference.sequences import Sequence, sequences

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments

SCORES_AT_A_TIME = 1 << 19
"""Scores in one block: 2 MiB in FP32, so that a block stays in cache from the first product to the last."""

ROWS_AT_A_TIME = 128
"""Rows of a block where a causal or window bound makes it worth to skip keys."""


@dataclass(frozen=True)
class Block:
    """Rows ``rows`` of query heads ``heads`` (key heads ``key_heads``) in sequences ``batch``, over ``keys``.

    ``rows`` and ``keys`` count over the tensor; ``sequence`` says where those of a packed sequence begin.
    """

    batch: slice
    heads: slice
    key_heads: slice
    rows: slice
    keys: slice
    group: int
    sequence: Sequence

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sequences, query heads, rows, keys."""
        return tuple(part.stop - part.start for part in (self.batch, self.heads, self.rows, self.keys))

    def stack(self, query_like: Tensor, dtype: torch.dtype) -> Tensor:
        """The block of a [B, H, Sq, W] as [sequences * key heads, group * rows, W]: all rows that share keys."""
        part = query_like[self.batch, self.heads, self.rows].to(dtype)
        sequences, heads, rows, width = part.shape
        return part.reshape(sequences * heads // self.group, self.group * rows, width)

    def stack_keys(self, key_like: Tensor, dtype: torch.dtype) -> Tensor:
        """The block of a [B, Hk, Sk, W] as [sequences * key heads, keys, W]."""
        part = key_like[self.batch, self.key_heads, self.keys].to(dtype)
        return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])

    def unstack(self, stacked: Tensor) -> Tensor:
        """[sequences * key heads, group * rows, W] as [sequences, query heads, rows, W], a view."""
        sequences, heads, rows, _ = self.sizes
        return stacked.view(sequences, heads, rows, stacked.shape[-1])

    def restack(self, scores: Tensor) -> Tensor:
        """[sequences, query heads, rows, keys] as [sequences * key heads, group * rows, keys], to be read."""
        sequences, heads, rows, keys = scores.shape
        return scores.reshape(sequences * heads // self.group, self.group * rows, keys)

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a 4-D tensor that broadcasts to [B, H, Sq, Sk] which broadcasts to the block."""
        parts = (self.batch, self.heads, self.rows, self.keys)
        return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, parts, strict=True))]

    def add_to(self, total: Tensor, value: Tensor) -> None:
        """Adds [sequences, query heads, rows, keys] ``value`` to its part of a broadcast ``total``, in place."""
        target = self.of(total)
        target.add_(value.sum_to_size(target.shape))


def blocks(arguments: AttentionArguments) -> Iterator[Block]:
    """The blocks of an attention: they cover every row of every head once; none for an empty output."""
    batch, heads, queries, _ = arguments.q.shape
    if batch and heads and queries:
        for sequence in sequences(arguments):
            yield from _blocks_of(arguments, sequence)


def _blocks_of(arguments: AttentionArguments, sequence: Sequence) -> Iterator[Block]:
    key_heads, group = arguments.k.shape[1], arguments.group
    queries, keys_of = sequence.rows.stop - sequence.rows.start, sequence.keys.stop - sequence.keys.start
    bounded = arguments.bounds != (None, None) and arguments.dead_rows == "zero"
    longest = ROWS_AT_A_TIME if bounded else queries
    rows = max(1, min(queries, longest, SCORES_AT_A_TIME // max(1, group * keys_of)))
    per_head = max(1, group * rows * keys_of)
    heads_at_once = min(key_heads, max(1, SCORES_AT_A_TIME // per_head))
    batch_at_once = max(1, SCORES_AT_A_TIME // (per_head * key_heads)) if heads_at_once == key_heads else 1
    for batch in _slices(slice(0, arguments.q.shape[0]), batch_at_once):
        for shared in _slices(slice(0, key_heads), heads_at_once):
            for part in _slices(sequence.rows, rows):
                keys = visible_keys(arguments, sequence, part) if bounded else sequence.keys
                of_heads = slice(shared.start * group, shared.stop * group)
                yield Block(batch, of_heads, shared, part, keys, group, sequence)


def _slices(whole: slice, step: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, step):
        yield slice(start, min(start + step, whole.stop))


def visible_keys(arguments: AttentionArguments, sequence: Sequence, rows: slice) -> slice:
    """The keys that causality and the window leave to any of ``rows``; empty where they leave none."""
    left, right = arguments.bounds
    start, stop = sequence.keys.start, sequence.keys.stop
    first = start if left is None else rows.start + sequence.offset - left
    last = stop if right is None else rows.stop + sequence.offset + right
    first = min(max(first, start), stop)
    return slice(first, max(first, min(last, stop)))
