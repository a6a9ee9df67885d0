"""``torch.ops.precisionpass.attention``: one opaque op, its backward, and who computes them.

Opaque, because an inlined body would let a compiler elide the roundings that the method rests on. On the CPU the
reference computes; on CUDA the Triton kernels where they support the arguments, else the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from types import ModuleType

import torch
from torch import Tensor

from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved, heads_last_empty
from precisionpass.ops.capabilities import DEVICES
from precisionpass.ops.checks import (
    ArgumentError,
    check_attention_formats,
    check_attention_sizes,
    refuse_double_backward,
    refuse_forward_mode,
)
from precisionpass.ops.clipping import clip_gradient, stop_at_bound
from precisionpass.ops.implementations import triton_kernels
from precisionpass.ops.packed import check_packed_formats, check_packed_sizes
from precisionpass.ops.recording import collector_of, in_force, kernel_forward
from precisionpass.reference import attention as reference
from precisionpass.reference import attention_backward as reference_backward

SETTINGS = (
    'float scale=1.0, str score="s", float softcap=0.0, str causal="none", int window_left=-1, int window_right=-1, '
    'float dropout_p=0.0, str dead_rows="zero", str normaliser="rounded", str delta="residual", '
    'float[] row_max_shift=[], str logit_clip="none", float logit_clip_max=0.0, float output_clip=0.0, '
    'float grad_clip=0.0, str grad_clip_kind="none", str on_nonfinite="keep", str matmul="", '
    'bool deterministic=True, bool save_residual=False, str probabilities="none", bool return_max_logits=False, '
    'str implementation="auto", str record="", bool record_forward=False'
)

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? mask=None, Tensor? sinks=None, "
    "Tensor[]? score_inputs=None, Tensor? seed=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    f"Tensor[]? fp8_scales=None, *, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

BACKWARD_SCHEMA = (
    "(Tensor grad_output, Tensor? grad_lse, Tensor? grad_probabilities, Tensor output, Tensor residual, Tensor lse, "
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? sinks, Tensor[] score_inputs, Tensor? seed, "
    f"Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool[] needs, *, {SETTINGS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)

INPUTS = tuple(field.name for field in fields(AttentionArguments))[:11]


def collect(inputs: Sequence[object], settings: dict[str, object]) -> AttentionArguments:
    """The op's positional inputs and settings as one AttentionArguments; lists become tuples."""
    values = dict(zip(INPUTS, inputs, strict=False)) | settings
    for name in ("score_inputs", "fp8_scales", "row_max_shift"):
        values[name] = tuple(values.get(name) or ())
    return AttentionArguments(**values)


def without_keys_is_zero(arguments: AttentionArguments) -> AttentionArguments:
    """With no keys at all every row is an empty sum, whatever becomes of rows whose keys are all masked."""
    return replace(arguments, dead_rows="zero") if arguments.k.shape[2] == 0 else arguments


def kernels_for(arguments: AttentionArguments, needs: tuple[bool, ...] = ()) -> ModuleType | None:
    """The Triton implementation if it is to compute this call, None for the reference. ``needs``: of a backward.

    Raises ArgumentError where ``implementation="triton"`` or ``"hopper"`` was asked for and cannot be had; a backward
    is one for all GPUs.
    """
    if arguments.implementation == "reference":
        return None
    kernels = triton_kernels("attention") if arguments.q.device.type in DEVICES["triton"] else None
    reason = "there is no Triton kernel for this device" if kernels is None else kernels.supports(arguments, needs)
    if reason is None and arguments.implementation == "hopper" and not needs:
        _, reason = kernels.chosen(arguments)
    if reason is None:
        return kernels
    if arguments.implementation in ("triton", "hopper"):
        raise ArgumentError(
            f'attention: implementation="{arguments.implementation}" cannot compute this call',
            where="implementation",
            why=reason,
            fix='implementation="auto" falls back to the reference',
        )
    return None


def _forward(*inputs: object, **settings: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = collect(inputs, settings)
    refuse_forward_mode("attention", arguments.q)
    check_attention_formats(arguments)
    check_packed_formats(arguments)
    check_attention_sizes(arguments)
    check_packed_sizes(arguments)
    arguments = without_keys_is_zero(in_force(arguments))
    collector = collector_of(arguments) if arguments.record_forward else None
    kernels = kernels_for(arguments)
    with torch.autocast(arguments.q.device.type, enabled=False):  # a region around the call must not round within
        if kernels is None:
            results = reference.forward(arguments, collector)
        else:
            results = kernel_forward(kernels, arguments, collector)
        if collector is not None:
            collector.tensors(q=arguments.q, k=arguments.k, v=arguments.v, output=results[0])
            collector.clips(results[0])
            collector.finish()
    return results


attention = torch.library.custom_op(
    "precisionpass::attention",
    _forward,
    mutates_args=(),
    schema=SCHEMA,
    tags=(torch.Tag.flexible_layout,),
)


@attention.register_fake
def _forward_fake(*inputs: object, **settings: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = collect(inputs, settings)
    refuse_forward_mode("attention", arguments.q)
    check_attention_formats(arguments)
    check_packed_formats(arguments)
    q, statistics = arguments.q, arguments.compute_dtype
    sequences, heads, queries, _ = q.shape
    keys, width = arguments.v.shape[2], arguments.v.shape[3]
    output = heads_last_empty(q, sequences, heads, queries, width, q.dtype)
    residual = q.new_empty(0, dtype=torch.int8)
    if arguments.keeps_residual:
        residual = heads_last_empty(q, sequences, heads, queries, width, torch.int8)
    lse = q.new_empty((sequences, heads, queries), dtype=statistics)
    max_logits = q.new_empty((sequences, heads) if arguments.return_max_logits else (0,), dtype=statistics)
    shape = (sequences, heads, queries, keys) if arguments.probabilities != "none" else (0,)
    return output, residual, lse, max_logits, q.new_empty(shape)


def _backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    grad_probabilities: Tensor | None,
    output: Tensor,
    residual: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    score_inputs: Sequence[Tensor],
    seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    needs: Sequence[bool],
    **settings: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    arguments = collect((q, k, v, bias, mask, sinks, score_inputs, seed, cu_seqlens_q, cu_seqlens_k), settings)
    refuse_forward_mode("attention_backward", q)
    arguments = without_keys_is_zero(in_force(arguments))
    collector = collector_of(arguments)
    upstream = stop_at_bound(grad_output, output, arguments.output_clip)
    gradients = Gradients(upstream, grad_lse, grad_probabilities, tuple(needs))
    saved = Saved(output, residual, lse)
    if arguments.products.any:  # no number of FP8 reaches a gradient: lse, delta and P are those of 16-bit products
        arguments = replace(arguments, matmul="", save_residual=True, return_max_logits=False)
        with torch.autocast(q.device.type, enabled=False):
            saved = Saved(*(kernels_for(arguments) or reference).forward(arguments)[:3])
    kernels = kernels_for(arguments, gradients.needs)
    compute = reference_backward.backward if kernels is None else kernels.backward
    with torch.autocast(q.device.type, enabled=False):
        *found, dscores = compute(gradients, arguments, saved, collector)
    clip = (arguments.grad_clip_kind, arguments.grad_clip, arguments.on_nonfinite)
    # What nobody needs is an empty tensor of its own: outputs of an op must not be one another.
    wanted = [gradient if needed else q.new_empty(0) for gradient, needed in zip(found, needs[:5], strict=True)]
    dq, dk, dv = (clip_gradient(gradient, *clip) for gradient in wanted[:3])
    if collector is not None:
        collector.tensors(q=q, k=k, v=v, output=output, grad_output=grad_output)
        collector.tensors(grad_q=wanted[0], grad_k=wanted[1], grad_v=wanted[2])
        collector.clips(output, tuple(wanted[:3]), (dq, dk, dv))
        collector.finish(upstream, output)
    scores = [gradient if needed else q.new_empty(0) for gradient, needed in zip(dscores, needs[5:], strict=True)]
    return dq, dk, dv, wanted[3], wanted[4], scores


attention_backward = torch.library.custom_op(
    "precisionpass::attention_backward",
    _backward,
    mutates_args=(),
    schema=BACKWARD_SCHEMA,
    tags=(torch.Tag.flexible_layout,),
)


@attention_backward.register_fake
def _backward_fake(
    grad_output, grad_lse, grad_probabilities, output, residual, lse, q, k, v, bias, mask, sinks,
    score_inputs, seed, cu_seqlens_q, cu_seqlens_k, needs, **settings,
):  # fmt: skip
    refuse_forward_mode("attention_backward", q)
    needs_q, needs_k, needs_v, needs_bias, needs_sinks, *needs_inputs = needs

    def heads_last(needed: bool, like: Tensor) -> Tensor:
        return heads_last_empty(like, *like.shape, like.dtype) if needed else q.new_empty(0)

    def plain(needed: bool, like: Tensor | None) -> Tensor:
        return like.new_empty(like.shape) if needed else q.new_empty(0)

    return (
        heads_last(needs_q, q),
        heads_last(needs_k, k),
        heads_last(needs_v, v),
        plain(needs_bias, bias),
        plain(needs_sinks, sinks),
        [plain(needed, like) for needed, like in zip(needs_inputs, score_inputs, strict=True)],
    )


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    q, k, v, bias, mask, sinks, score_inputs, *others, _ = inputs  # others: seed and the two cu_seqlens
    result, residual, lse, max_logits, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logits, residual)
    ctx.save_for_backward(result, residual, lse, q, k, v, bias, mask, sinks, *others, *(score_inputs or ()))
    ctx.settings = keyword_only_inputs


def _autograd_backward(ctx, grad_output, grad_residual, grad_lse, grad_max_logits, grad_probabilities):
    result, residual, lse, q, k, v, bias, mask, sinks, *others = ctx.saved_tensors
    others, score_inputs = others[:3], others[3:]
    wanted = list(ctx.needs_input_grad)  # trailing defaults are missing from it, lists are lists
    q_to_sinks = [bool(needed) for needed in (wanted + [False] * 6)[:6]]
    needs = q_to_sinks[:4] + q_to_sinks[5:]
    needs_inputs = [bool(needed) for needed in wanted[6]] if score_inputs else []
    if grad_output is None:
        needs[2] = False  # V is read by the output alone: no gradient, as eager has it, not one of zeros
        grad_output = torch.zeros_like(result)
    if ctx.settings["probabilities"] == "none":
        grad_probabilities = None
    *gradients, dscores = torch.ops.precisionpass.attention_backward(
        grad_output, grad_lse, grad_probabilities, result, residual, lse, q, k, v, bias, mask, sinks,
        score_inputs, *others, needs + needs_inputs, **ctx.settings,
    )  # fmt: skip
    found = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    answer = [*found[:4], None, found[4]]
    for needed in wanted[6:]:
        answer.append([None] * len(needed) if isinstance(needed, (list, tuple)) else None)
    if score_inputs:
        answer[6] = [gradient if needed else None for gradient, needed in zip(dscores, needs_inputs, strict=True)]
    return tuple(answer[: len(wanted)])


attention.register_autograd(_autograd_backward, setup_context=_setup_context)
attention_backward.register_autograd(lambda ctx, *gradients: refuse_double_backward("attention"))
