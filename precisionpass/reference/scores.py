"""From q and k to the scores S that the softmax reads, and from dS back: the score expression, caps, bias and masks.

Order: s = scale * q.k (FP32, never rounded to 16 bits); score(s); softcap; logit clip; + bias; masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.reference.blocks import Block
from precisionpass.score.derivative import derivative
from precisionpass.score.evaluate import evaluate
from precisionpass.score.grammar import parse

if TYPE_CHECKING:
    from precisionpass.hooks.collector import Collector
    from precisionpass.ops.arguments import AttentionArguments

MINUS_INFINITY = float("-inf")


def raw_product(arguments: AttentionArguments, query: Tensor, key: Tensor, block: Block) -> Tensor:
    """``scale * query @ key^T`` as [sequences, heads, rows, keys]; operands stacked, FP32 (exact for 16-bit inputs)."""
    empty = query.new_empty(())
    product = torch.baddbmm(empty, query, key.transpose(1, 2), beta=0.0, alpha=arguments.scale)
    return block.unstack(product)


def reshapes(arguments: AttentionArguments) -> bool:
    """Whether anything but bias and masks stands between the raw product and S, so that dS is not d(raw)."""
    return arguments.score != "s" or arguments.softcap > 0 or arguments.logit_clip != "none"


def logits(
    arguments: AttentionArguments,
    raw: Tensor,
    block: Block,
    *,
    keep_raw: bool = False,
    collector: Collector | None = None,
) -> Tensor:
    """S of a block from its raw product; written over ``raw`` unless ``keep_raw``. collector: sees it, where given."""
    scores = raw
    if reshapes(arguments):
        for forward, _ in _steps(arguments, block):
            before, scores = scores, forward(scores)
        if collector is not None and arguments.logit_clip != "none":  # the clip is the last step
            collector.raw(block, before)
        if scores is raw and keep_raw:
            scores = raw.clone()
    if arguments.bias is not None:
        scores.add_(block.of(arguments.bias).to(scores.dtype))
    if arguments.mask is not None:
        scores.masked_fill_(block.of(arguments.mask).logical_not(), MINUS_INFINITY)
    scores = exclude(arguments, scores, block, MINUS_INFINITY)
    if collector is not None:
        collector.scores(block, scores)
    return scores


def exclude(arguments: AttentionArguments, scores: Tensor, block: Block, value: float) -> Tensor:
    """Fills the keys that causality and the window exclude with ``value``, in place; touches only their columns."""
    left, right = arguments.bounds
    offset = block.rows.start + block.sequence.offset - block.keys.start
    rows, keys = scores.shape[2:]
    row = torch.arange(rows, device=scores.device).unsqueeze(1) + offset
    key = torch.arange(keys, device=scores.device)
    if right is not None and keys:
        first = min(max(offset + right + 1, 0), keys)
        scores[..., first:].masked_fill_(key[first:] > row + right, value)
    if left is not None and keys:
        end = min(max(offset + rows - 1 - left, 0), keys)
        scores[..., :end].masked_fill_(key[:end] < row - left, value)
    return scores


def logits_backward(
    arguments: AttentionArguments, raw: Tensor, gradient: Tensor, block: Block, inputs: dict[int, Tensor]
) -> Tensor:
    """d(raw product) from dS (bias and masks already passed); adds the score inputs' gradients to ``inputs``.

    ``raw``: the raw product of the block. ``inputs``: accumulators by index, broadcast shapes, for those that want one.
    """
    stages = [raw]
    steps = _steps(arguments, block)
    for forward, _ in steps:
        stages.append(forward(stages[-1]))
    for (_, backward), before, after in zip(reversed(steps), reversed(stages[:-1]), reversed(stages[1:]), strict=True):
        gradient = backward(before, after, gradient, inputs)
    return gradient


Step = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor, dict[int, Tensor]], Tensor]]


def _steps(arguments: AttentionArguments, block: Block) -> list[Step]:
    """Each stage that is switched on, as (forward, backward); no stage writes to its input."""
    steps: list[Step] = []
    if arguments.score != "s":
        steps.append(_score_step(arguments, block))
    if arguments.softcap > 0:
        steps.append(_tanh_step(arguments.softcap))
    if arguments.logit_clip == "tanh":
        steps.append(_tanh_step(arguments.logit_clip_max))
    if arguments.logit_clip == "hard":
        steps.append(_hard_step(arguments.logit_clip_max))
    return steps


def _tanh_step(cap: float) -> Step:
    def backward(before: Tensor, after: Tensor, gradient: Tensor, inputs: dict[int, Tensor]) -> Tensor:
        return (after / cap).square_().neg_().add_(1.0).mul_(gradient)

    return (lambda scores: (scores / cap).tanh_().mul_(cap)), backward


def _hard_step(bound: float) -> Step:
    def backward(before: Tensor, after: Tensor, gradient: Tensor, inputs: dict[int, Tensor]) -> Tensor:
        return gradient.masked_fill(before.abs() > bound, 0.0)

    return (lambda scores: scores.clamp(-bound, bound)), backward


def _score_step(arguments: AttentionArguments, block: Block) -> Step:
    expression = parse(arguments.score)

    def forward(scores: Tensor) -> Tensor:
        value = evaluate(expression, score_values(arguments, scores, block), scores).to(scores.dtype)
        if value.shape == scores.shape and value is not scores:
            return value
        return value.expand(scores.shape).clone(memory_format=torch.contiguous_format)

    def backward(before: Tensor, after: Tensor, gradient: Tensor, inputs: dict[int, Tensor]) -> Tensor:
        values = score_values(arguments, before, block)
        for index, total in inputs.items():
            slope = evaluate(derivative(expression, f"t{index}"), values, before)
            block.add_to(total, gradient * slope)
        return gradient * evaluate(derivative(expression, "s"), values, before)

    return forward, backward


def score_values(arguments: AttentionArguments, scores: Tensor, block: Block) -> dict[str, Tensor]:
    """The names of a score expression in a block: s, t0.., and the positions b, h, i, j as broadcast tensors.

    In a packed attention b is the number of the sequence, and i and j count from its beginning.
    """
    values = {"s": scores}
    for index, tensor in enumerate(arguments.score_inputs):
        part = block.of(tensor)
        values[f"t{index}"] = part if part.dtype == torch.bool else part.to(scores.dtype)
    sequence = block.sequence
    parts = (block.batch, block.heads, block.rows, block.keys)
    begins = (-(sequence.number or 0), 0, sequence.rows.start, sequence.keys.start)
    for axis, (name, part, begin) in enumerate(zip("bhij", parts, begins, strict=True)):
        shape = [1, 1, 1, 1]
        shape[axis] = part.stop - part.start
        positions = torch.arange(part.start - begin, part.stop - begin, dtype=scores.dtype, device=scores.device)
        values[name] = positions.view(shape)
    return values
