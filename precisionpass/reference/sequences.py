"""Where each sequence of an attention stands: all of a dense batch at once, or one after the other when packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments


@dataclass(frozen=True)
class Sequence:
    """Rows and keys that belong together; row r is aligned with key r + offset. ``number``: None for a dense batch."""

    number: int | None
    rows: slice
    keys: slice
    offset: int


def sequences(arguments: AttentionArguments) -> Iterator[Sequence]:
    """The sequences of an attention, in order; of a packed one also, without a key, the rows past the last of them.

    Reads cu_seqlens on the host.
    """
    queries, keys = arguments.q.shape[2], arguments.k.shape[2]
    if arguments.cu_seqlens_q is None:
        yield Sequence(None, slice(0, queries), slice(0, keys), arguments.key_offset)
        return
    row_bounds = [*arguments.cu_seqlens_q.tolist(), queries]
    key_bounds = arguments.cu_seqlens_k.tolist()
    key_bounds.append(key_bounds[-1])
    for number in range(len(row_bounds) - 1):
        rows = slice(row_bounds[number], row_bounds[number + 1])
        part = slice(key_bounds[number], key_bounds[number + 1])
        ends = part.stop - rows.stop
        yield Sequence(number, rows, part, ends if arguments.causal == "bottom_right" else part.start - rows.start)
