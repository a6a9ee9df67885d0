"""The figures of one call, block by block, as an implementation walks over an attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.hooks.figures import FLUSHED
from precisionpass.hooks.recorder import SiteTotals
from precisionpass.numerics.fp8 import E4M3, flushed, quantise

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments
    from precisionpass.reference.blocks import Block


class Collector:
    """Collects what its site records; `finish` hands it on. Sums are FP64, one for each head.

    A figure that an implementation does not call for is not recorded for that call.
    """

    def __init__(self, site: SiteTotals, arguments: AttentionArguments) -> None:
        self.site, self.arguments = site, arguments
        self.heads = arguments.q.shape[1]
        packed = arguments.cu_seqlens_q
        self.sequences = arguments.q.shape[0] if packed is None else packed.numel() - 1
        self.parts: dict[str, Tensor] = {}
        self.row_sums: Tensor | None = None

    def wants(self, record: str) -> bool:
        """Whether the site records this."""
        return record in self.site.records

    def operands(self, **tensors: Tensor) -> None:
        """The largest finite magnitude of each tensor, by its name among OPERANDS, and what FP8 flushes of q, k, v."""
        if self.wants("amax"):
            for name, tensor in tensors.items():
                if tensor.numel():
                    self.parts[f"amax_{name}"] = finite(tensor.detach()).abs().amax().double()

        if self.wants("fp8"):
            for row, (name, scale) in FLUSHED.items():
                if name in tensors and tensors[name].numel():
                    tensor = finite(tensors[name].detach())
                    self.parts[row] = flushed(tensor, quantise(tensor, E4M3, scale, by_column=name == "v"))

    def output(self, output: Tensor) -> None:
        """[B, H, Sq, Dv] as it leaves the site: elements that are not finite, and those at the clip."""
        if self.wants("nonfinite"):
            self.parts["nonfinite_outputs"] = (~output.isfinite()).sum((0, 2, 3))
        if self.wants("clipped") and self.arguments.output_clip > 0:
            bound = torch.tensor(self.arguments.output_clip, dtype=output.dtype).item()
            self.parts["clipped_outputs"] = (output.abs() >= bound).sum((0, 2, 3))

    def gradients(self, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> None:
        """dq, dk, dv as computed and as clipped."""
        if self.wants("nonfinite"):
            self.parts["nonfinite_gradients"] = sum((~one.isfinite()).sum() for one in before)
        if self.wants("clipped") and self.arguments.grad_clip_kind != "none":
            pairs = zip(before, after, strict=True)
            self.parts["clipped_gradients"] = sum(((old != new) & old.isfinite()).sum() for old, new in pairs)

    def raw(self, block: Block, raw: Tensor) -> None:
        """Scores in front of a clip, before anything is added to them."""
        if self.wants("clipped"):
            self._of("clipped_logits")[block.heads] += (raw.abs() > self.arguments.logit_clip_max).sum((0, 2, 3))

    def scores(self, block: Block, scores: Tensor) -> None:
        """S of a block, [sequences, heads, rows, keys], -inf where excluded; not kept and not changed."""
        if not scores.shape[-1]:
            return
        largest = scores.amax(-1, keepdim=True)
        if self.wants("max_logit"):
            row = self._of("max_logit", -torch.inf)[block.heads]
            torch.maximum(row, finite(largest, -torch.inf).amax((0, 2, 3)).double(), out=row)
        if self.wants("repeated_maxima"):
            repeats = ((scores == largest).sum(-1) > 1) & largest.squeeze(-1).isfinite()
            self._of("repeats")[block.heads] += repeats.sum((0, 2))

    def weights(self, block: Block, weights: Tensor, sink: Tensor | float = 0.0, dead: Tensor | None = None) -> None:
        """P of a block, [sequences, heads, rows, keys].

        dead: rows without an allowed key, [.., 1]; given by a backward, whose P need not sum to 1.
        """
        if self.wants("row_sum") and dead is not None and weights.shape[-1]:
            error = (weights.sum(-1, keepdim=True) + sink - 1).abs().masked_fill(dead, 0.0)
            row = self._of("row_sum_error", -torch.inf)[block.heads]
            torch.maximum(row, error.amax((0, 2, 3)).double(), out=row)
        if self.wants("entropy"):
            found = finite(torch.special.entr(weights)).sum((0, 2, 3), dtype=torch.float64)
            self._of("entropy")[block.heads] += found

    def row_sum(self, block: Block, row_sum: Tensor) -> None:
        """What rowsum dS is more than it should be, [sequences, heads, rows, 1]."""
        if self.wants("delta_bias"):
            number = block.sequence.number
            batch = block.batch if number is None else slice(number, number + 1)
            self._sequence_sums()[batch, block.heads] += finite(row_sum).sum((2, 3), dtype=torch.float64)

    def finish(self, upstream: Tensor | None = None, output: Tensor | None = None) -> None:
        """Hand the figures on. upstream, output: dO and O, whose products the bias is measured against."""
        if self.row_sums is not None and upstream is not None and output is not None:
            size = finite(upstream.float() * output.float()).abs()
            self.parts["bias"] = self.row_sums.sum(0)
            self.parts["bias_square"] = self.row_sums.square().sum(0)
            self.parts["bias_size"] = size.sum((0, 2, 3), dtype=torch.float64)
        if self.parts and self.sequences:
            q = self.arguments.q
            self.parts["rows"] = torch.full((self.heads,), q.shape[0] * q.shape[2], device=q.device)
            self.site.add(self.parts, self.heads, self.sequences, is_step=upstream is not None)

    def _sequence_sums(self) -> Tensor:
        if self.row_sums is None:  # one more: the rows past the last of packed sequences
            shape = (self.sequences + 1, self.heads)
            self.row_sums = torch.zeros(shape, dtype=torch.float64, device=self.arguments.q.device)
        return self.row_sums

    def _of(self, name: str, start: float = 0.0) -> Tensor:
        if name not in self.parts:
            device = self.arguments.q.device
            self.parts[name] = torch.full((self.heads,), start, dtype=torch.float64, device=device)
        return self.parts[name]


def finite(tensor: Tensor, instead: float = 0.0) -> Tensor:
    """`tensor` with `instead` where it is inf or nan."""
    return torch.where(tensor.isfinite(), tensor, instead)
