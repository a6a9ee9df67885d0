"""Functions of the user's on the tensors around an attention op, called by the graph and traced with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from precisionpass import graph
from precisionpass.decide import Decision
from precisionpass.errors import PrecisionPassError
from precisionpass.rewriting.writer import Writer
from precisionpass.shadow import fill_in_examples

Hooks = Mapping[str, Callable]


class _OnGradient(torch.autograd.Function):
    """The tensor as it is; its gradient as the function gives it."""

    @staticmethod
    def forward(ctx, tensor: Tensor, function: Callable) -> Tensor:
        ctx.function = function
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return ctx.function(gradient), None


def hooked(writer: Writer, decision: Decision, hooks: Hooks, tensor: str, node: fx.Node) -> fx.Node:
    """`node` after every hook at `tensor` (q, k, v or output) and, on the way back, at its gradient, in their order.

    Raises PrecisionPassError where one fails on fake tensors, or gives another shape, dtype or device.
    """
    gradient = "grad_output" if tensor == "output" else f"grad_{tensor}"
    for hook in decision.values["hooks"]:
        function = _checked(decision, hook["call"], hooks[hook["call"]])
        if hook["at"] == tensor:
            node = writer.call(function, node)
            fill_in_examples(writer.before.graph.owning_module, writer.made, writer.shadow.ambient, strict=True)
        elif hook["at"] == gradient:
            node = writer.call(on_gradient(function), node)
    return node


def _checked(decision: Decision, name: str, function: Callable) -> Callable:
    """The function, whose mistakes are told as the hook's, where and whenever it is traced."""
    place = decision.origin.module or decision.origin.source

    def call(tensor: Tensor) -> Tensor:
        before = _version(tensor)
        try:
            result = function(tensor)
        except Exception as error:
            raise _wrong(name, place, f"{type(error).__name__}: {str(error).strip()[:400]}") from error
        if _version(tensor) != before:
            raise _wrong(name, place, "it changed its tensor in place, which others read too")
        if not isinstance(result, Tensor):
            raise _wrong(name, place, f"it gave a {type(result).__name__}, not a tensor")
        same = result.dim() == tensor.dim() and all(map(graph.same_size, result.shape, tensor.shape))
        if not same or (result.dtype, result.device) != (tensor.dtype, tensor.device):
            raise _wrong(name, place, f"it gave {_shown(result)} for {_shown(tensor)}")
        return result

    call.__name__ = call.__qualname__ = name
    return call


def on_gradient(function: Callable) -> Callable:
    """A function that gives its tensor as it is, and its gradient as `function` does."""

    def call(tensor: Tensor) -> Tensor:
        return _OnGradient.apply(tensor, function)

    call.__name__ = call.__qualname__ = f"{function.__name__}_on_gradient"
    return call


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]} on {tensor.device}"


def _wrong(name: str, place: str, why: str) -> PrecisionPassError:
    return PrecisionPassError(
        f"the hook {name} failed", where=place, why=why, code="PP135",
        fix="a hook gives a tensor of the shape, dtype and device that it got, changes nothing in place, and can be "
        "traced by torch.compile",
    )  # fmt: skip
