"""When the Hopper kernels take an attention: the reason why not, in words that reach a user through the review."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
import triton

from precisionpass.kernels import tuning
from precisionpass.kernels.launch import Plan

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments

SWITCH = "PRECISIONPASS_HOPPER"
WIDTHS = (64, 128)
FEW_ROWS = 64
ROWS_OF_A_TILE = 128
FEWEST_KEYS, FEWEST_ROUNDS = 4096, 4  # from here on clearly faster than the portable kernels (docs/kernels.md)
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TRIED = ((3, 6), (3, 7))
GLUON = VERSION in TRIED


def chosen(arguments: AttentionArguments) -> tuple[str, str | None]:
    """("hopper", None) where the Hopper kernels are to compute this forward, else ("triton", why they are not)."""
    with torch.cuda.device_of(arguments.q):
        reason = refusal(Plan(arguments))
    return ("triton", reason) if reason else ("hopper", None)


def refusal(plan: Plan) -> str | None:
    """None where the Hopper forward computes this attention, else why the portable kernels do.

    implementation="hopper" asks for it wherever it can; "auto" where it was measured to be the faster one.
    """
    arguments = plan.arguments
    if arguments.implementation == "triton":
        return 'implementation="triton" asks for the portable kernels'
    reason = _platform() or _shapes(plan) or _features(arguments)
    if reason or arguments.implementation == "hopper":
        return reason
    if plan.widest == tuning.NARROW:
        return "the portable forward is as fast for narrow heads"
    return _slower(plan)


def backward_refusal(plan: Plan) -> str | None:
    """None where the Hopper backward computes this attention, else why the portable kernels do."""
    arguments = plan.arguments
    if arguments.implementation == "triton":
        return 'implementation="triton" asks for the portable kernels'
    if plan.width != plan.value_width:
        return "the Hopper backward takes values as wide as keys"
    if arguments.probabilities != "none":
        return "the Hopper backward takes no gradient of the probabilities"
    if plan.variant["dead_rows_nan"]:
        return 'the Hopper backward gives rows without a key 0, not dead_rows="nan"'
    if plan.widest == tuning.NARROW and arguments.deterministic and arguments.implementation != "hopper":
        return "the portable backward is as fast for narrow heads where dQ has to repeat"
    reason = _platform() or _shapes(plan) or _features(arguments)
    return reason if reason or arguments.implementation == "hopper" else _slower(plan)


def _slower(plan: Plan) -> str | None:
    """Where the Hopper kernels were not measured to be clearly faster (docs/kernels.md)."""
    if plan.left is not None:
        return "the Hopper kernels were not measured to be faster for windows"
    if not plan.arguments.keeps_residual:
        return "the Hopper kernels were not measured to be faster without a residual"
    if plan.key_count < FEWEST_KEYS:
        return f"the Hopper kernels were not measured to be faster for fewer than {FEWEST_KEYS} keys"
    tiles = -(-plan.query_count // ROWS_OF_A_TILE) * plan.batch * plan.heads
    if tiles < FEWEST_ROUNDS * tuning.multiprocessors(plan.arguments.q.device):
        return f"the Hopper kernels were not measured to be faster for under {FEWEST_ROUNDS} tiles a multiprocessor"
    return None


def _platform() -> str | None:
    if os.environ.get(SWITCH, "1") in ("0", "off"):
        return f"{SWITCH} switches the Hopper kernels off"
    if tuning.architecture() != "hopper":
        return "the GPU is no Hopper (compute capability 9.0)"
    if not GLUON:
        return f"the Hopper kernels were tried with triton 3.6 and 3.7, not {triton.__version__}"
    return None


def _shapes(plan: Plan) -> str | None:
    if plan.exact:
        return "the Hopper kernels compute in bfloat16 and float16"
    if plan.width not in WIDTHS or plan.value_width not in WIDTHS:
        return "the Hopper kernels take head dimensions of 33 to 128"
    if not plan.variant["descriptors"]:
        return "a tensor's rows are not contiguous, or its strides no multiples of 16 bytes"
    if plan.query_count <= FEW_ROWS:
        return f"the Hopper kernels are for more than {FEW_ROWS} rows"
    return None


def _features(arguments: AttentionArguments) -> str | None:
    asked = {
        "a mask given as a tensor": arguments.mask is not None,
        "a bias": arguments.bias is not None,
        "sinks": arguments.sinks is not None,
        "packed sequences": arguments.packed,
        "dropout": arguments.dropout_p > 0,
        "a score expression": arguments.score != "s",
        "softcap": arguments.softcap > 0,
        "logit clipping": arguments.logit_clip != "none",
        "FP8 products": arguments.products.any,
        "output clipping": arguments.output_clip > 0,
        "row_max_shift": bool(arguments.row_max_shift),
        "normaliser: float32": arguments.normaliser != "rounded",
        "a scale that is not positive": not 0 < arguments.scale < math.inf,
    }
    found = [name for name, holds in asked.items() if holds]
    return f"the Hopper kernels have not {found[0]}" if found else None
