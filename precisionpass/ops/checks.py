"""Refusals: what is wrong with an argument, why it cannot be served, and the way out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from precisionpass.errors import PrecisionPassError
from precisionpass.numerics.formats import SIXTEEN_BIT
from precisionpass.ops.arguments import AttentionArguments
from precisionpass.ops.capabilities import CHOICES, FLOATING, RESERVED, shift_limit
from precisionpass.score.grammar import ScoreError, parse


class ArgumentError(PrecisionPassError, ValueError):
    """An argument of an op that cannot be right, whatever the implementation."""


class DtypeError(PrecisionPassError, TypeError):
    """A tensor in a format that the op does not compute in."""


class NotBuiltError(PrecisionPassError, NotImplementedError):
    """A feature that the schema names and no implementation has yet."""


class DerivativeError(PrecisionPassError, RuntimeError):
    """A derivative that the op does not have: forward mode, or of its backward."""


def refuse_forward_mode(op: str, *tensors: Tensor | None) -> None:
    """Raises DerivativeError inside a forward-mode level: the tangent would be lost, not computed.

    Inside ``torch.func.jvp`` an op sees its inputs without their tangents, so any call in there is refused.
    """
    probe = next((tensor for tensor in tensors if tensor is not None), None)
    if probe is not None and _in_forward_mode(probe):
        raise DerivativeError(
            f"precisionpass::{op} has no forward-mode derivative (jvp)",
            why="the tangent would silently be zero",
            fix="use reverse mode (backward, torch.func.vjp), or keep this site out of the rules",
        )


def _in_forward_mode(probe: Tensor) -> bool:
    """Outside a level unpack_dual hands back the tensor itself; inside one a view or, on a fake tensor, an error."""
    try:
        return forward_ad.unpack_dual(probe).primal is not probe
    except RuntimeError:
        return True


def refuse_double_backward(op: str) -> None:
    """Raises DerivativeError: the backward of ``op`` is not differentiable."""
    raise DerivativeError(
        f"precisionpass::{op} has no second derivative (double backward)",
        why="its backward is an op of its own, without a derivative",
        fix="keep this site out of the rules where gradients of gradients are needed (gradient penalties, MAML)",
    )


def check_float(op: str, **tensors: Tensor | None) -> None:
    """Raises DtypeError for a tensor that is not bfloat16, float16, float32 or float64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            raise DtypeError(
                f"{op}: {name} is {_short(tensor.dtype)}",
                where=name,
                why="the op computes in bfloat16, float16, float32 and float64",
                fix=f"convert it first, for example {name}.to(torch.bfloat16)",
            )


def check_norm(op: str, x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None) -> None:
    """Formats, the number of normalised dimensions, and the parameters' ranks."""
    check_float(op, x=x, weight=weight, bias=bias)
    if not 1 <= dims <= x.dim():
        raise ArgumentError(
            f"{op}: dims is {dims} for a tensor of {x.dim()} dimensions",
            where="dims",
            why="it counts the last dimensions, over which a row is normalised",
            fix=f"a number from 1 to {x.dim()}",
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[x.dim() - dims :]:
            raise ArgumentError(
                f"{op}: {name} {list(tensor.shape)} is not the shape of a row, {list(x.shape[x.dim() - dims :])}",
                where=name,
                why=f"each element of the last {dims} dimensions has its own",
                fix="expand it, or check dims",
            )


def check_attention_formats(arguments: AttentionArguments) -> None:
    """Everything that does not need sizes: formats, ranks, words, numbers, reserved arguments, the score's text."""
    check_float("attention", q=arguments.q, k=arguments.k, v=arguments.v, bias=arguments.bias, sinks=arguments.sinks)
    dtypes = [_short(tensor.dtype) for tensor in (arguments.q, arguments.k, arguments.v)]
    if len(set(dtypes)) > 1:
        raise ArgumentError(
            f"attention: q, k and v are {', '.join(dtypes)}",
            where="q, k, v",
            why="one product has one format; a silent promotion would hide a cast the model makes",
            fix="convert them to one dtype",
        )
    for name, tensor in _four_dimensional(arguments).items():
        if tensor.dim() != 4:
            raise ArgumentError(
                f"attention: {name} has {tensor.dim()} dimensions",
                where=name,
                why="it is read as [batch, heads, rows, keys or width]",
                fix="unsqueeze or view it to four; a size of 1 broadcasts",
            )
    if arguments.mask is not None and arguments.mask.dtype != torch.bool:
        raise DtypeError(
            f"attention: mask is {_short(arguments.mask.dtype)}",
            where="mask",
            why="True means may attend; numbers are added, and that is bias",
            fix="pass it as bias, or convert it with mask.bool()",
        )
    for index, tensor in enumerate(arguments.score_inputs):
        if tensor.dtype != torch.bool:
            check_float("attention", **{f"score_inputs[{index}]": tensor})
    _check_words(arguments)
    _check_products(arguments)
    _check_numbers(arguments)
    _check_score(arguments)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _four_dimensional(arguments: AttentionArguments) -> dict[str, Tensor]:
    tensors = {name: getattr(arguments, name) for name in ("q", "k", "v", "bias", "mask", "sinks")}
    tensors |= {f"score_inputs[{index}]": tensor for index, tensor in enumerate(arguments.score_inputs)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _check_words(arguments: AttentionArguments) -> None:
    for name, remedy in RESERVED.items():
        value = getattr(arguments, name)
        if isinstance(value, Tensor) or value:
            raise NotBuiltError(
                f"attention: {name} is reserved", where=name, why="no implementation reads it", fix=remedy
            )
    for name, allowed in CHOICES.items():
        value = getattr(arguments, name)
        if value not in allowed:
            raise ArgumentError(
                f"attention: {name} is {value!r}", where=name, why="no such choice", fix=f"one of {', '.join(allowed)}"
            )
    if arguments.on_nonfinite == "raise" and not arguments.record:
        raise ArgumentError(
            'attention: on_nonfinite="raise" without record',
            where="on_nonfinite",
            why="what is not finite is counted where record says, and raised when that is read, not in the step",
            fix='compile with a rule that says on_nonfinite: raise, or use "zero" or "keep"',
        )


def _check_products(arguments: AttentionArguments) -> None:
    try:
        products = arguments.products
    except ValueError as error:
        raise ArgumentError(
            f"attention: matmul is {arguments.matmul!r}",
            where="matmul",
            why=str(error),
            fix='for example "qk=fp8_e4m3 pv=fp8_e4m3 scale=head", or "" for none in FP8',
        ) from None
    if products.any and not arguments.rounds:
        raise DtypeError(
            f"attention: FP8 products of {_short(arguments.q.dtype)}",
            where="matmul",
            why="who keeps 32 bits or more asked for them",
            fix='convert q, k and v to bfloat16 or float16, or leave matmul=""',
        )
    if products.any and arguments.delta == "output":
        raise ArgumentError(
            'attention: delta="output" with FP8 products',
            where="delta",
            why="the output has the errors of FP8, and delta would hand them to every gradient",
            fix='delta="residual" or "recompute"',
        )


def _check_numbers(arguments: AttentionArguments) -> None:
    def refuse(name: str, why: str, fix: str) -> None:
        raise ArgumentError(f"attention: {name} is {getattr(arguments, name)!r}", where=name, why=why, fix=fix)

    if not 0.0 <= arguments.dropout_p <= 1.0:
        refuse("dropout_p", "it is a probability", "a number from 0 to 1")
    if arguments.dropout_p > 0 and (arguments.seed is None or arguments.seed.dtype != torch.int64):
        refuse(
            "dropout_p",
            "the mask comes from a seed, so that forward, backward and recomputation agree",
            "pass seed=torch.randint(2**63 - 1, (1,)), int64, on the device of q",
        )
    for name in ("softcap", "output_clip", "grad_clip"):
        if getattr(arguments, name) < 0:
            refuse(name, "a bound is not negative", "0 switches it off")
    if arguments.logit_clip != "none" and arguments.logit_clip_max <= 0:
        refuse("logit_clip_max", f'logit_clip="{arguments.logit_clip}" needs a bound', "a number above 0")
    if arguments.grad_clip_kind != "none" and arguments.grad_clip <= 0:
        refuse("grad_clip", f'grad_clip_kind="{arguments.grad_clip_kind}" needs a bound', "a number above 0")
    if not arguments.row_max_shift:
        return
    if len(arguments.row_max_shift) != 3:
        refuse("row_max_shift", "it is [beta, limit, tolerance]", "three numbers, or [] for none")
    beta, limit, tolerance = arguments.row_max_shift
    dtype = _short(arguments.q.dtype)
    highest = shift_limit(arguments.q.dtype, arguments.products.pv is not None)
    if beta < 1 or not 0 <= limit <= highest or tolerance < 0:
        refuse(
            "row_max_shift",
            f"outside beta >= 1, 0 <= limit <= {highest:g}, tolerance >= 0 rows of {dtype} underflow",
            "for example [2.0, 8.0, 0.0]",
        )
    if arguments.normaliser != "rounded" and arguments.q.dtype in SIXTEEN_BIT:
        refuse("row_max_shift", "a shift with a normaliser of unrounded P biases every row", 'normaliser="rounded"')


def _check_score(arguments: AttentionArguments) -> None:
    try:
        names = parse(arguments.score).names()
    except ScoreError as error:
        raise ArgumentError(
            f"attention: {error}",
            where="score",
            why="only the closed grammar is read",
            fix='"s" leaves scores as they are',
        ) from None
    known = {"s", "b", "h", "i", "j", *(f"t{index}" for index in range(len(arguments.score_inputs)))}
    if names - known:
        raise ArgumentError(
            f"attention: score reads {', '.join(sorted(names - known))}",
            where="score",
            why=f"there are {len(arguments.score_inputs)} score inputs",
            fix="pass the tensor in score_inputs",
        )


def check_attention_sizes(arguments: AttentionArguments) -> None:
    """Everything that needs sizes: called where they are numbers, so that no length makes torch.compile run again."""
    q, k, v = arguments.q, arguments.k, arguments.v
    sequences, heads, queries, width = q.shape
    if k.shape[0] != sequences or k.shape[3] != width or v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not belong together",
            where="q, k, v",
            why="they are read as q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]",
            fix="expand a broadcast batch (no memory is used), transpose heads to the second dimension",
        )
    if heads and (not k.shape[1] or heads % k.shape[1]):
        raise ArgumentError(
            f"attention: {heads} query heads over {k.shape[1]} key heads",
            where="k",
            why="each key head serves the same number of query heads",
            fix="a number of key heads that divides the query heads",
        )
    full = (sequences, heads, queries, k.shape[2])
    for name, tensor in _four_dimensional(arguments).items():
        target = (*full[:3], 1) if name == "sinks" else full
        if name in ("q", "k", "v"):
            continue
        if any(size not in (1, whole) for size, whole in zip(tensor.shape, target, strict=True)):
            raise ArgumentError(
                f"attention: {name} {list(tensor.shape)} does not broadcast to {list(target)}",
                where=name,
                why="each of its sizes is 1 or the full one",
                fix="view or expand it to that shape",
            )
    if arguments.dropout_p > 0 and arguments.seed.numel() != 1:
        raise ArgumentError(
            f"attention: seed has {arguments.seed.numel()} elements",
            where="seed",
            why="one call has one seed",
            fix="pass one int64",
        )
