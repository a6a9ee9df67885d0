"""From an op's tensors to kernel arguments: the variant, the bounds, descriptors or strides, and the launch itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from precisionpass.kernels import tuning
from precisionpass.kernels.attention_combine import splits_for
from precisionpass.kernels.mask_survey import survey
from precisionpass.kernels.score_code import score_function
from precisionpass.kernels.sequences import most_blocks
from precisionpass.kernels.variant import Numbers, Packing, Shift, Strides, Variant

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments

FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
NO_STRIDES = Strides(0, 0, 0, 0)
FARTHEST = 1 << 30
FEW_ROWS = 64
MOST_TOGETHER = 8  # their keys have to stay in the cache
SHORT = 4096  # fewer keys than this, and a forward's loop is short as if it were bounded


def launch(kernel: Any, programs: int, tile: tuning.Tile, *arguments: Any, **constants: Any) -> None:
    """Start `programs` programs on the current stream. No synchronisation, no benchmark: safe in a CUDA graph."""
    kernel[(programs,)](*arguments, **constants, **options_of(tile))


def options_of(tile: tuning.Tile) -> dict[str, int]:
    """Triton's launch options for a tile."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options | {"maxnreg": tile.registers} if tile.registers else options


def padded(width: int) -> int:
    """The tile width for rows of `width` elements: a power of two, at least 16 (the smallest product)."""
    return max(16, triton.next_power_of_2(width))


def heads_last(like: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """An uninitialised [B, H, S, W] whose memory is [B, S, H, W], contiguous."""
    batch, heads, length, width = shape
    return torch.empty((batch, length, heads, width), dtype=dtype, device=like.device).transpose(1, 2)


def strides_of(tensor: Tensor | None) -> Strides:
    """Strides with 0 along axes of one element, so that a broadcast axis is read over and over."""
    if tensor is None:
        return NO_STRIDES
    return Strides(*(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def describable(tensor: Tensor) -> bool:
    """Whether a descriptor can read the tensor: rows contiguous, base and strides in multiples of 16 bytes."""
    size = tensor.element_size()
    if tensor.numel() == 0 or tensor.stride(3) != 1 or tensor.data_ptr() % 16:
        return False
    steps = [stride for length, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if length > 1]
    return all(stride > 0 and stride * size % 16 == 0 for stride in steps)


def aligned_strides(tensor: Tensor) -> list[int]:
    """Strides of a describable [B, H, S, W], in multiples of 16 bytes along axes of one element too."""
    aligned = max(16 // tensor.element_size(), 1)
    steps = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return [*(stride if length > 1 else aligned for length, stride in steps), 1]


def described(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of [B, H, S, W] that moves `rows` rows of one head at a time."""
    return TensorDescriptor(tensor, list(tensor.shape), aligned_strides(tensor), [1, 1, rows, width])


def _readable(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernels read it: bytes, or FP32 where it is one row for all queries.

    A load pipeline moves four bytes or more at a time; a row of bytes would be waited for in every block.
    """
    if mask is None:
        return None
    return _bytes(near(mask)) if mask.shape[2] > 1 else mask.to(torch.float32)


def near(term: Tensor) -> Tensor:
    """A tensor by row and key whose keys stand within 2^31 elements of the first: kernels count those in 32 bits."""
    return term if term.stride(3) * term.shape[3] < 1 << 31 else term.contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """A bool tensor as uint8, others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


class Plan:
    """One attention as the kernels see it: shared by forward and backward, made anew for each call."""

    def __init__(self, arguments: AttentionArguments, probability_gradient: Tensor | None = None) -> None:
        self.arguments = arguments
        if probability_gradient is not None:
            probability_gradient = near(probability_gradient)
        q, k, v = arguments.q, arguments.k, arguments.v
        self.operands = q, k, v
        self.batch, self.heads, self.query_count, head_dim = q.shape
        self.key_heads, self.key_count, value_dim = k.shape[1], k.shape[2], v.shape[3]
        self.architecture = tuning.architecture()
        self.exact = q.dtype == torch.float32
        self.width, self.value_width = padded(head_dim), padded(value_dim)
        self.widest = max(self.width, self.value_width)
        self.left, self.right = self._bounds()
        self.diagonal = 0 if arguments.packed else arguments.key_offset
        self.sequences = len(arguments.cu_seqlens_q) - 1 if arguments.packed else 0
        self.mask = _readable(arguments.mask)
        self.bias = None if arguments.bias is None else near(arguments.bias)
        self.numbers = Numbers(
            float(arguments.scale),
            float(arguments.softcap),
            float(arguments.logit_clip_max),
            arguments.dropped_share,
            output_limit=float(arguments.output_clip) if arguments.output_clip > 0 else None,
            score_inputs=self._score_inputs(),
            shift=Shift(*map(float, arguments.row_max_shift)) if arguments.row_max_shift else None,
            probability_gradient=probability_gradient,
            probability_strides=None if probability_gradient is None else strides_of(probability_gradient),
            packing=self._packing(),
            together=self._together(),
        )
        bias, mask = arguments.bias, arguments.mask
        shaped = arguments.score != "s" or arguments.softcap > 0 or arguments.logit_clip != "none"
        plain = bias is None and not shaped and not arguments.row_max_shift
        by_row_and_key = any(term is not None and term.shape[2] > 1 and term.shape[3] > 1 for term in (bias, mask))
        self.heavy = by_row_and_key or not plain or arguments.dropout_p > 0
        # What the kernels write is packed [B, S, H, W]; its rows, the residual's too, must be multiples of 16 bytes.
        packed = head_dim % 8 == 0 and value_dim % 16 == 0
        # A descriptor knows the tensor's end, not a sequence's.
        descriptors = tuning.moves_tiles(self.architecture) and not self.exact and packed and not arguments.packed
        shared = mask is not None and mask.shape[1] == 1 and not arguments.packed
        surveyed = shared and min(mask.shape[2], mask.shape[3]) > FEW_ROWS
        self.variant = {
            "head_dim": head_dim,
            "value_dim": value_dim,
            "width": self.width,
            "value_width": self.value_width,
            "descriptors": descriptors and all(describable(tensor) for tensor in (q, k, v)),
            "grouped": self.heads != self.key_heads,
            "right_bound": self.right is not None,
            "left_bound": self.left is not None,
            # Narrow heads have the registers for a second loop, and a branch would cost a twentieth of a block.
            "apart": self.right is not None and self.left is None and mask is None and self.widest <= tuning.NARROW,
            "fused_scale": plain and 0 < arguments.scale < math.inf,
            "score": None if arguments.score == "s" else score_function(arguments.score, arguments.score_inputs),
            "softcap": arguments.softcap > 0,
            "logit_clip": arguments.logit_clip,
            "bias": bias is not None,
            "bias_varies_by_query": bias is not None and bias.shape[2] > 1,
            "bias_varies_by_key": bias is not None and bias.shape[3] > 1,
            "together": self.numbers.together is not None,
            "mask": mask is not None,
            # One more reading of the mask by each kernel: a few hundredths of its time where all heads share it.
            "surveyed": surveyed,
            "mask_varies_by_query": mask is not None and mask.shape[2] > 1,
            "mask_varies_by_key": mask is not None and mask.shape[3] > 1,
            "dropout": arguments.dropout_p > 0,
            "dead_rows": self._may_hold_dead_rows(),
            "dead_rows_nan": arguments.dead_rows == "nan" and self._may_hold_dead_rows(),
            "exact": self.exact,
            "dtype": FORMATS[q.dtype],
            "probability_dtype": FORMATS[q.dtype],
            "packed": arguments.packed,
            "bottom_right": arguments.packed and arguments.causal == "bottom_right",
            "probability_gradient": arguments.probabilities if probability_gradient is not None else "none",
        }

    def _bounds(self) -> tuple[int | None, int | None]:
        """The window around the diagonal; a side that excludes no key of any row is dropped."""
        arguments = self.arguments
        left, right = arguments.bounds
        if arguments.packed:
            return left, right
        if right is not None and right >= self.key_count - 1 - arguments.key_offset:
            right = None
        if left is not None and left >= self.query_count - 1 + arguments.key_offset:
            left = None
        return left, right

    def _score_inputs(self) -> tuple[tuple[Tensor, Strides], ...] | None:
        inputs = self.arguments.score_inputs
        if self.arguments.score == "s" or not inputs:
            return None
        return tuple((tensor, strides_of(tensor)) for tensor in (_bytes(near(read)) for read in inputs))

    def _packing(self) -> Packing | None:
        arguments = self.arguments
        return Packing(arguments.cu_seqlens_q, arguments.cu_seqlens_k, self.sequences) if arguments.packed else None

    def _together(self) -> int | None:
        """How many sequences, a divisor of all, share what is read of a bias by row and key; None where it is small."""
        bias = self.arguments.bias
        if bias is None or bias.shape[0] > 1 or bias.shape[2] == 1 or bias.shape[3] == 1:
            return None
        together = max(count for count in range(1, MOST_TOGETHER + 1) if self.batch % count == 0)
        return together if together > 1 else None

    def _may_hold_dead_rows(self) -> bool:
        """Whether mask, bias or window can leave a row without a key; causality from the top left never does."""
        arguments = self.arguments
        masked = arguments.mask is not None or arguments.bias is not None or arguments.packed or arguments.score != "s"
        return masked or self.left is not None or self.key_count == 0 or (self.right is not None and self.diagonal < 0)

    def tile(self, kernel: str) -> tuning.Tile:
        """The tile of a kernel for this attention."""
        short = kernel == tuning.FORWARD and self.key_count < SHORT
        variant = self.variant
        return tuning.tile_for(
            kernel,
            self.architecture,
            self.widest,
            exact=self.exact,
            descriptors=variant["descriptors"],
            bounded=self.right is not None or self.query_count <= FEW_ROWS or short,
            heavy=self.heavy,
            dropout=variant["dropout"],
            bits=variant["surveyed"] and variant["fused_scale"] and not variant["dropout"],
            fp8=kernel == tuning.FORWARD and self.arguments.products.any,
        )

    def variant_for(self, tile: tuning.Tile, **settings: Any) -> Variant:
        """What to compile a kernel for, with the lengths set against its tile."""
        whole = {
            "whole_queries": self.query_count % tile.query_block == 0 and not self.arguments.packed,
            "whole_keys": self.key_count % tile.key_block == 0 and not self.arguments.packed,
        }
        return Variant(**{**self.variant, **whole, **settings})

    def tiled(self, tensor: Tensor, rows: int, width: int) -> tuple[Any, Strides]:
        """How a kernel gets at a [B, H, S, W] tensor: a descriptor, or a pointer and its strides."""
        if self.variant["descriptors"]:
            return described(tensor, rows, width), NO_STRIDES
        return tensor, strides_of(tensor)

    def inputs(self, tile: tuning.Tile) -> tuple[Any, ...]:
        """q, k, v, bias, mask and the strides of each, in the kernels' order."""
        query, key, value = self.operands
        value_tile = tile.key_block, self.value_width
        if self.variant.get("pv_exponent"):  # V is turned
            value_tile = value_tile[::-1]
        return (
            *self.tiled(query, tile.query_block, self.width),
            *self.tiled(key, tile.key_block, self.width),
            *self.tiled(value, *value_tile),
            self.bias,
            strides_of(self.bias),
            self.mask,
            strides_of(self.mask),
        )

    def survey(
        self, launch: Callable[..., None], tile: tuning.Tile, *, by_key: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """(kinds, words) of the mask for a kernel's tile, by rows or by keys; None where the mask is not surveyed."""
        if self.mask is None or not self.variant["surveyed"]:
            return None
        mask, strides, tile = self.mask, strides_of(self.mask), (tile.query_block, tile.key_block)
        return survey(launch, mask, strides, (self.query_count, self.key_count), tile, by_key=by_key)

    def sizes(self) -> tuple[int, int, int, int, int, int, int, Numbers]:
        """Heads, group, lengths, bounds and numbers, in the kernels' order."""
        left = min(self.left, FARTHEST) if self.left is not None else 0
        right = min(self.right, FARTHEST) if self.right is not None else 0
        group = self.heads // self.key_heads
        return self.heads, group, self.query_count, self.key_count, left, right, self.diagonal, self.numbers

    def splits(self, tile: tuning.Tile, programs: int) -> int:
        """Parts to split each row's keys into: more than one where few rows would leave the device idle."""
        if self.query_count > FEW_ROWS or self.arguments.sinks is not None or self.arguments.packed:
            return 1
        key_blocks = triton.cdiv(self.key_count, tile.key_block)
        return splits_for(programs, key_blocks, tuning.multiprocessors(self.arguments.q.device))

    def query_programs(self, rows: int) -> int:
        """Programs that cover all rows of all heads."""
        return self._blocks(self.query_count, rows) * self.batch * self.heads

    def key_programs(self, keys: int) -> int:
        """Programs that cover all keys of all key heads."""
        return self._blocks(self.key_count, keys) * self.batch * self.key_heads

    def _blocks(self, total: int, block: int) -> int:
        if self.arguments.packed:
            return most_blocks(total, self.sequences, block)
        return triton.cdiv(total, block)
