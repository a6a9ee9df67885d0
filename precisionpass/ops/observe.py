"""``torch.ops.precisionpass.observe``: an attention that stays as it is, and the figures of it.

Gives a copy of the output, bit for bit, and passes its gradient on as it is. Beside it the attention is computed once
more in plain PyTorch, for its scores and probabilities; the bias is that of the model's own output, as a fused kernel
would put it into the gradient: dS = P * (dP - rowsum(dO * O)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved
from precisionpass.ops.attention import SETTINGS, collect, without_keys_is_zero
from precisionpass.ops.checks import (
    check_attention_formats,
    check_attention_sizes,
    refuse_double_backward,
    refuse_forward_mode,
)
from precisionpass.ops.recording import collector_of
from precisionpass.reference import attention as reference
from precisionpass.reference import attention_backward as reference_backward

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? mask=None, Tensor? sinks=None, "
    "Tensor[]? score_inputs=None"
)
SCHEMA = f"(Tensor output, {_TENSORS}, *, {SETTINGS}) -> Tensor"
BACKWARD_SCHEMA = f"(Tensor grad_output, Tensor output, {_TENSORS}, *, {SETTINGS}) -> Tensor"


def _observed(output: Tensor, inputs: Sequence[object], settings: dict[str, object]) -> AttentionArguments:
    arguments = replace(collect(inputs, settings), delta="output", normaliser="float32", save_residual=False)
    refuse_forward_mode("observe", output)
    check_attention_formats(arguments)
    check_attention_sizes(arguments)
    return without_keys_is_zero(arguments)


def _forward(output: Tensor, *inputs: object, **settings: object) -> Tensor:
    arguments = _observed(output, inputs, settings)
    collector = collector_of(arguments) if arguments.record_forward else None
    if collector is not None:
        with torch.autocast(output.device.type, enabled=False):
            reference.forward(arguments, collector)
            collector.tensors(q=arguments.q, k=arguments.k, v=arguments.v, output=output)
            collector.finish()
    return output.clone()


def _backward(grad_output: Tensor, output: Tensor, *inputs: object, **settings: object) -> Tensor:
    arguments = _observed(output, inputs, settings)
    collector = collector_of(arguments)
    if collector is not None:
        with torch.autocast(output.device.type, enabled=False):
            lse = reference.forward(arguments)[2]
            upstream = grad_output.to(output.dtype)
            nothing = (False,) * (5 + len(arguments.score_inputs))
            saved = Saved(output, output.new_empty(0, dtype=torch.int8), lse)
            reference_backward.backward(Gradients(upstream, None, None, nothing), arguments, saved, collector)
            q, k, v = arguments.q, arguments.k, arguments.v
            collector.tensors(q=q, k=k, v=v, output=output, grad_output=grad_output)
            collector.finish(upstream, output)
    return grad_output.clone()


observe = torch.library.custom_op("precisionpass::observe", _forward, mutates_args=(), schema=SCHEMA)
observe_backward = torch.library.custom_op(
    "precisionpass::observe_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA
)
observe.register_fake(lambda output, *inputs, **settings: torch.empty_like(output))
observe_backward.register_fake(lambda grad_output, *inputs, **settings: torch.empty_like(grad_output))


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    *tensors, score_inputs = inputs
    ctx.save_for_backward(*tensors, *(score_inputs or ()))
    ctx.settings = keyword_only_inputs


def _autograd_backward(ctx, grad_output):
    tensors = ctx.saved_tensors
    settings = ctx.settings
    gradient = torch.ops.precisionpass.observe_backward(grad_output, *tensors[:7], list(tensors[7:]), **settings)
    others = [[None] * len(one) if isinstance(one, (list, tuple)) else None for one in ctx.needs_input_grad[1:]]
    return (gradient, *others)


observe.register_autograd(_autograd_backward, setup_context=_setup_context)
observe_backward.register_autograd(lambda ctx, gradient: refuse_double_backward("observe"))
