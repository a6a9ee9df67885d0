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
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TRIED = ((3, 6), (3, 7))
GLUON = VERSION in TRIED


def chosen(arguments: AttentionArguments) -> tuple[str, str | None]:
    """("hopper", None) where the Hopper kernels are to compute this forward, else ("triton", why they are not)."""
    with torch.cuda.device_of(arguments.q):
        reason = refusal(Plan(arguments))
    return ("triton", reason) if reason else ("hopper", None)


def refusal(plan: Plan) -> str | None:
    """None where the Hopper forward computes this attention, else why the portable kernels do."""
    arguments = plan.arguments
    if arguments.implementation != "hopper":
        return 'the Hopper kernels compute where implementation="hopper" asks for them: their bias is not measured yet'
    return _platform() or _shapes(plan) or _features(arguments)


def backward_refusal(plan: Plan) -> str | None:
    """None where the Hopper backward computes this attention, else why the portable kernels do."""
    arguments = plan.arguments
    if plan.width != plan.value_width:
        return "the Hopper backward takes values as wide as keys"
    if arguments.probabilities != "none":
        return "the Hopper backward takes no gradient of the probabilities"
    if plan.variant["dead_rows_nan"]:
        return 'the Hopper backward gives rows without a key 0, not dead_rows="nan"'
    return refusal(plan)


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
