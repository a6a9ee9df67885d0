"""Dropout from a counter: the mask is a function of the seed and the position, so nothing has to be stored.

Philox 4x32-10 as ``triton.language.rand(seed, offset)`` has it, bit for bit: a Triton kernel, the forward, the
backward and a checkpoint's recomputation all see the same mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
SCALE = 4.6566127342e-10
ELEMENTS_AT_A_TIME = 1 << 16


def _multiply(constant: int, counter: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * counter; int64 wraps, but its 64 bits are the right ones."""
    product = counter * constant
    low = product & LOW
    return product.bitwise_right_shift_(32).bitwise_and_(LOW), low


def uniform(seed: int, offset: Tensor) -> Tensor:
    """FP32 in [0, 1) for each int64 ``offset``: what ``tl.rand(seed, offset)`` gives for it, ten rounds."""
    key_0, key_1 = seed & LOW, (seed >> 32) & LOW
    c0, c1 = offset & LOW, (offset >> 32).bitwise_and_(LOW)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        high_b, low_b = _multiply(ROUND_B, c2)
        high_a, low_a = _multiply(ROUND_A, c0)
        c0 = high_b.bitwise_xor_(c1).bitwise_xor_(key_0)
        c2 = high_a.bitwise_xor_(c3).bitwise_xor_(key_1)
        c1, c3 = low_b, low_a
        key_0, key_1 = (key_0 + KEY_A) & LOW, (key_1 + KEY_B) & LOW
    signed = c0.to(torch.int32)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32).mul_(SCALE)


def keep_mask(seed: Tensor, probability: float, offset: Tensor) -> Tensor:
    """Bool like ``offset`` (int64 positions ``((b*H + h)*Sq + i)*Sk + j``): True where ``rand >= probability``."""
    kept = torch.empty(offset.shape, dtype=torch.bool, device=offset.device)
    start = int(seed.reshape(-1)[0])
    flat_offset, flat_kept = offset.reshape(-1), kept.view(-1)
    step = ELEMENTS_AT_A_TIME if offset.device.type == "cpu" else max(offset.numel(), 1)
    for first in range(0, flat_offset.numel(), step):
        part = slice(first, first + step)
        torch.ge(uniform(start, flat_offset[part]), probability, out=flat_kept[part])
    return kept
