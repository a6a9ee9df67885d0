"""A score expression on torch tensors: the plain PyTorch meaning of the grammar."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor

from precisionpass.score.grammar import Node


def evaluate(node: Node, values: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """``node`` with ``values`` for its names, in ``like``'s format and on its device; the shape broadcasts.

    ``values``: tensors that broadcast with one another, floating ones already in ``like``'s format, or bool. Names are
    never written to. Raises KeyError for a name that ``values`` lacks.
    """
    constants: dict[float, Tensor] = {}

    def visit(part: Node) -> Tensor:
        if part.operation == "number":
            value = float(part.value)
            return constants.setdefault(value, torch.full((), value, dtype=like.dtype, device=like.device))
        if part.operation == "name":
            return values[str(part.value)]
        return _OPERATIONS[part.operation](*(visit(argument) for argument in part.arguments))

    return visit(node)


_OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "negative": operator.neg,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "where": torch.where,
    "clamp": torch.clamp,
}
