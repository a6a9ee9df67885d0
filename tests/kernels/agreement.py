"""Run a case forward and backward and hold every result against float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from precisionpass.kernels import attention
from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved
from precisionpass.ops.clipping import stop_at_bound
from precisionpass.reference import attention as reference
from precisionpass.reference.attention import dropout_mask
from precisionpass.reference.blocks import blocks
from tests.kernels.oracle import Oracle, oracle

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}
NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


def kept_mask(arguments: AttentionArguments) -> Tensor | None:
    """The whole dropout mask, [B, H, Sq, Sk], from the reference's stream."""
    if arguments.dropout_p == 0:
        return None
    kept = torch.zeros(*arguments.q.shape[:3], arguments.k.shape[2], dtype=torch.bool, device=arguments.q.device)
    for block in blocks(replace(arguments, causal="none", window_left=-1, window_right=-1)):
        kept[block.batch, block.heads, block.rows, block.keys] = dropout_mask(arguments, block)
    return kept


def error(found: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """The norm of the error relative to the truth's, or to `floor`; infinite where NaN stands in other places."""
    found, truth = found.detach().double(), truth.detach().double()
    if not torch.equal(found.isnan(), truth.isnan()):
        return float("inf")
    difference = (found - truth).nan_to_num(0.0)
    return float(difference.norm() / truth.nan_to_num(0.0).norm().clamp(min=max(floor, 1e-30)))


def lse_error(found: Tensor, truth: Oracle) -> float:
    """The largest error of the log-sum-exp over (|lse| + 10); infinite where dead rows differ."""
    dead = truth.lse == float("-inf")
    if not torch.equal(found == float("-inf"), dead):
        return float("inf")
    difference = (found.double() - truth.lse).masked_fill(dead, 0.0).abs()
    return float((difference / (truth.lse.masked_fill(dead, 0.0).abs() + 10)).max())


def log_sum_unit(arguments: AttentionArguments) -> float:
    """What the log-sum-exp is held to, over (|lse| + 10): FP32's rounding, or that of P where it is P's rounded sum."""
    return ROUNDING[arguments.q.dtype] / 10 if arguments.keeps_residual else 2.0**-20


def _expected(arguments: AttentionArguments, truth: Oracle) -> Tensor:
    """The exact output; where a shift moves what is rounded away, that of the reference, which is rounded the same."""
    return reference.forward(arguments)[0] if arguments.row_max_shift else truth.output


def disagreements(case, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """The errors of a case in units of its format's rounding; about 1 is a rounding, above 3 is a fault."""
    arguments = case.build(dtype, device)
    assert attention.supports(arguments) is None
    upstream, lse_gradient, probability_gradient = case.upstream(arguments)
    output, residual, lse, max_logits, probabilities = attention.forward(arguments)
    upstream = stop_at_bound(upstream, output, arguments.output_clip)
    truth = oracle(arguments, kept_mask(arguments), upstream, lse_gradient, probability_gradient)
    needs = [True, True, True, arguments.bias is not None, arguments.sinks is not None]
    needs += [tensor.is_floating_point() and not arguments.packed for tensor in arguments.score_inputs]
    gradients = Gradients(upstream, lse_gradient, probability_gradient, tuple(needs))
    *found, dinputs = attention.backward(gradients, arguments, Saved(output, residual, lse))
    names = (*NAMES, *(f"dt{index}" for index in range(len(dinputs))))
    # A gradient that is zero in exact arithmetic is held against the size of what cancels in it.
    floor = float(upstream.double().norm()) * 1e-1
    result = {
        "output": error(output, _expected(arguments, truth)),
        "lse": lse_error(lse, truth) / log_sum_unit(arguments) * ROUNDING[dtype],
        "max_logits": error(max_logits, truth.max_logits) / 2.0**-20 * ROUNDING[dtype],
    }
    if arguments.probabilities != "none":
        result["probabilities"] = error(probabilities, truth.probabilities)
    for name, gradient, exact, needed in zip(names, (*found, *dinputs), truth.gradients, needs, strict=True):
        if needed:
            result[name] = error(gradient, exact, floor)
    return {name: value / ROUNDING[dtype] for name, value in result.items()}
