"""Dropout from a counter: the mask is a function of the seed and the position, so nothing has to be stored.

Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: seven rounds pass every test of
BigCrush) as ``triton.language.randint4x(seed, offset, 7)`` has it, bit for bit: a Triton kernel, the forward, the
backward and a checkpoint's recomputation all see the same mask. One call serves eight neighbouring keys with 16 bits
each, so a probability counts in steps of 2^-16 (``AttentionArguments.dropped_share``), the factor of what is kept too.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
ROUNDS = 7
AT_A_TIME = 8
CALLS_AT_A_TIME = 1 << 16


def _multiply(constant: int, counter: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * counter; int64 wraps, but its 64 bits are the right ones."""
    product = counter * constant
    low = product & LOW
    return product.bitwise_right_shift_(32).bitwise_and_(LOW), low


def philox(seed: int, offset: Tensor) -> Tensor:
    """The four 32-bit words of each int64 ``offset``, int64 [..., 4]: what ``tl.randint4x(seed, offset, 7)`` gives."""
    key_0, key_1 = seed & LOW, (seed >> 32) & LOW
    c0, c1 = offset & LOW, (offset >> 32).bitwise_and_(LOW)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        high_b, low_b = _multiply(ROUND_B, c2)
        high_a, low_a = _multiply(ROUND_A, c0)
        c0 = high_b.bitwise_xor_(c1).bitwise_xor_(key_0)
        c2 = high_a.bitwise_xor_(c3).bitwise_xor_(key_1)
        c1, c3 = low_b, low_a
        key_0, key_1 = (key_0 + KEY_A) & LOW, (key_1 + KEY_B) & LOW
    return torch.stack((c0, c1, c2, c3), -1)


def keep_mask(seed: Tensor, share: float, row: Tensor, keys: slice, key_count: int) -> Tensor:
    """Bool [..., keys]: True where P is kept.

    ``seed`` int64 [1]. ``share``: dropped part, a multiple of 2^-16. ``row``: int64 [...], the number
    ``(b*H + h)*Sq + i`` of each row. Key j reads half ``j % 2`` of word ``(j % 8) // 2`` of the call at
    ``row * ceil(key_count / 8) + j // 8`` and is kept where that is at least ``share * 2^16``.
    """
    start = int(seed.reshape(-1)[0])
    first, last = keys.start // AT_A_TIME, -(-keys.stop // AT_A_TIME)
    calls = row.reshape(-1, 1) * -(-key_count // AT_A_TIME) + torch.arange(first, last, device=row.device)
    kept = torch.empty((*calls.shape, 4, 2), dtype=torch.bool, device=row.device)
    rows = max(CALLS_AT_A_TIME // max(last - first, 1), 1) if row.device.type == "cpu" else max(row.numel(), 1)
    limit = round(share * 2**16)
    for begin in range(0, row.numel(), rows):
        part = kept[begin : begin + rows]
        words = philox(start, calls[begin : begin + rows])
        torch.ge(words & 0xFFFF, limit, out=part[..., 0])
        torch.ge(words >> 16, limit, out=part[..., 1])
    kept = kept.view(row.numel(), -1)[:, keys.start - first * AT_A_TIME : keys.stop - first * AT_A_TIME]
    return kept.reshape(*row.shape, keys.stop - keys.start)
