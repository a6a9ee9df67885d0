"""Tile shapes, warps and pipeline stages by kernel, architecture and width: measured once, looked up at every launch.

Nothing is benchmarked at a user's first step. A row says which width (of the wider of a K and a V row, padded to a
power of two) it serves; the first row at least as wide is taken.
"""

from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """Rows and keys of a program's tile, warps, stages of the load pipeline, columns of ones for the normaliser.

    registers: the most a thread may use, so that another program fits beside; 0 leaves it to the compiler.
    deferred: a block's P V is added while the next Q K^T runs; it takes registers for both.
    """

    query_block: int
    key_block: int
    warps: int
    stages: int
    ones_width: int = 16
    registers: int = 0
    deferred: bool = False


FORWARD, KEY_VALUE, QUERY, REVISIT = "forward", "key_value", "query", "revisit"

_HOPPER = {
    FORWARD: {
        64: Tile(64, 128, 4, 2, 8),
        128: Tile(128, 128, 8, 3, 8, deferred=True),
        256: Tile(128, 64, 8, 2, 8),
    },
    KEY_VALUE: {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 64, 8, 2)},
    QUERY: {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 3)},
    REVISIT: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 1)},
}
# Where bounds make the loops short, two small programs on a multiprocessor hide the beginning and end of each other.
_HOPPER_BOUNDED = {FORWARD: {128: Tile(64, 64, 4, 3, 8, deferred=True)}, KEY_VALUE: {64: Tile(64, 64, 4, 2)}}
# Beside a mask of bits, without bounds; the registers of dQ leave room for a second program.
_HOPPER_BITS = {
    FORWARD: {64: Tile(64, 128, 4, 2, 8), 128: Tile(64, 64, 4, 3, 8, deferred=True)},
    QUERY: {64: Tile(128, 64, 8, 3, registers=128)},
}
NARROW = 64
_AMPERE = {
    FORWARD: {64: Tile(64, 64, 4, 3, 8), 128: Tile(128, 64, 8, 3, 8), 256: Tile(64, 32, 8, 2, 8)},
    KEY_VALUE: {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(16, 64, 8, 1)},
    QUERY: {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    REVISIT: {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 8, 1), 256: Tile(64, 16, 8, 1)},
}
_BLACKWELL = {
    FORWARD: {64: Tile(128, 64, 4, 3, 16), 128: Tile(128, 64, 8, 2, 16), 256: Tile(128, 32, 8, 2, 16)},
    KEY_VALUE: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 1), 256: Tile(32, 64, 8, 1)},
    QUERY: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 1), 256: Tile(64, 32, 8, 1)},
    REVISIT: {64: Tile(64, 64, 4, 1), 128: Tile(64, 64, 8, 1), 256: Tile(64, 32, 8, 1)},
}
_SMALL = {  # 64 to 99 KiB of shared memory: consumer cards, CDNA 3
    FORWARD: {64: Tile(64, 64, 4, 2, 16), 128: Tile(64, 32, 4, 2, 16), 256: Tile(64, 16, 8, 1, 16)},
    KEY_VALUE: {64: Tile(32, 64, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 8, 1)},
    QUERY: {64: Tile(64, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(32, 16, 8, 1)},
    REVISIT: {64: Tile(64, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(32, 16, 8, 1)},
}
_EXACT = {  # FP32 products on the CUDA cores: registers are the limit, whatever the architecture
    FORWARD: {64: Tile(32, 32, 4, 1), 128: Tile(32, 16, 4, 1), 256: Tile(16, 16, 4, 1)},
    KEY_VALUE: {64: Tile(16, 32, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 8, 1)},
    QUERY: {64: Tile(32, 16, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 8, 1)},
    REVISIT: {64: Tile(32, 16, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 8, 1)},
}
_TABLES = {"hopper": _HOPPER, "blackwell": _BLACKWELL, "ampere": _AMPERE, "small": _SMALL}


def architecture() -> str:
    """The table to use for the device that Triton would launch on now."""
    if triton.knobs.runtime.interpret:
        return "ampere"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda":
        return "small"
    if target.arch // 10 == 9:
        return "hopper"
    if target.arch // 10 in (10, 11):
        return "blackwell"
    return "ampere" if target.arch == 80 else "small"


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 elsewhere, where nothing is gained from filling them."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def moves_tiles(name: str) -> bool:
    """Whether the architecture loads tiles by descriptor (TMA)."""
    return name in ("hopper", "blackwell") and not triton.knobs.runtime.interpret


def tile_for(
    kernel: str, name: str, width: int, *, exact: bool, descriptors: bool, bounded: bool, heavy: bool, dropout: bool,
    fp8: bool = False, bits: bool = False,
) -> Tile:  # fmt: skip
    """The tile of `kernel` on architecture `name` for rows of `width` elements, 16 to 256.

    exact: FP32 inputs. descriptors: tiles are moved by TMA; by pointers, addresses take registers as on Ampere.
    bounded: causal or windowed. heavy: scores need further registers (a mask or bias by row and key, a cap, dropout).
    dropout: the backward holds words of Philox beside both sums. fp8: operands of the forward are FP8, which takes 32
    keys or more, and ones of width 16, a product of its own kind on Hopper. bits: heavy by nothing but a surveyed mask.
    """
    if moves_tiles(name) and not descriptors:
        name = "ampere"
    table = (_EXACT if exact else _TABLES[name])[kernel]
    served = min(row for row in table if row >= width)
    tile = table[served]
    if exact:
        return tile
    if bounded and name == "hopper":
        tile = _HOPPER_BOUNDED.get(kernel, {}).get(served, tile)
    elif bits and name == "hopper" and not fp8 and served in _HOPPER_BITS.get(kernel, {}):
        return _HOPPER_BITS[kernel][served]
    if kernel == KEY_VALUE and ((dropout and served == 128) or (heavy and name == "ampere")):
        tile = tile._replace(query_block=min(tile.query_block, 32))
    if fp8:
        tile = tile._replace(key_block=max(tile.key_block, 32), ones_width=16)
    if heavy and tile.key_block >= 128:
        return tile._replace(key_block=64)
    return tile
