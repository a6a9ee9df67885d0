"""What the kernels take, and the words for what they leave to the reference: they reach a user through the review."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from precisionpass.kernels.score_code import MOST_STATEMENTS, statement_count
from precisionpass.numerics.fp8 import has_fp8

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments

WIDEST = 256


def supports(arguments: AttentionArguments, needs: tuple[bool, ...] = ()) -> str | None:
    """None where the kernels can run this attention; else the reason, for the review and for the fallback.

    ``needs``: of a backward, which inputs want a gradient: q, k, v, bias, sinks, then the score inputs.
    """
    q, v = arguments.q, arguments.v
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels compute in bfloat16, float16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"the kernels take head dimensions up to {WIDEST}, not {max(q.shape[3], v.shape[3])}"
    if arguments.score != "s" and statement_count(arguments.score) > MOST_STATEMENTS:
        return f"the kernels take score expressions of at most {MOST_STATEMENTS} operations, their slopes included"
    reason = _packed_supports(arguments, needs) if arguments.packed else None
    return reason or (_fp8_supports(arguments) if arguments.products.any else None)


def _packed_supports(arguments: AttentionArguments, needs: tuple[bool, ...]) -> str | None:
    if any(needs[5:]):
        return "the kernels have no gradients of score inputs over packed sequences"
    if arguments.bias is not None:
        return "the kernels take no bias over packed sequences"
    if arguments.probabilities != "none":
        return "the kernels do not return the probabilities of packed sequences"
    if arguments.dead_rows == "nan":
        return 'the kernels give rows of packed sequences without a key 0, not dead_rows="nan"'
    return None


def _fp8_supports(arguments: AttentionArguments) -> str | None:
    if arguments.q.is_cuda and not has_fp8("cuda"):
        return "this device has no FP8 products"
    if arguments.implementation != "triton":
        return 'the FP8 kernels have not run on a GPU yet: implementation="triton" asks for them'
    if arguments.packed:
        return "the kernels have no FP8 products over packed sequences"
    if arguments.probabilities != "none":
        return "the kernels do not return probabilities beside FP8 products"
    return None
