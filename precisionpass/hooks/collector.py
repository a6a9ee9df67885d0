"""The figures of one call, block by block, as an implementation walks over an attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.hooks.figures import FLUSHED
from precisionpass.hooks.recorder import SiteTotals
from precisionpass.numerics.fp8 import E4M3, flushed, quantise

if TYPE_CHECKING:
    from precisionpass.ops.arguments import AttentionArguments
    from precisionpass.reference.blocks import Block

Measure = Callable[[Mapping[str, Tensor]], dict[str, tuple[Tensor, Tensor]]]


class Collector:
    """Collects what its site records; `finish` hands it on. Sums are FP64, one for each head.

    A figure that an implementation does not call for is not recorded for that call. measure: how magnitudes are found,
    which an implementation may know better. call: totals of the call that an implementation has folded itself.
    """

    def __init__(self, site: SiteTotals, arguments: AttentionArguments) -> None:
        self.site, self.arguments = site, arguments
        self.heads = arguments.q.shape[1]
        packed = arguments.cu_seqlens_q
        self.sequences = arguments.q.shape[0] if packed is None else packed.numel() - 1
        self.parts: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        self.measure: Measure = magnitudes
        self.row_sums: Tensor | None = None
        self.call: Tensor | None = None
        self.sees_scores = False

    def wants(self, record: str) -> bool:
        """Whether the site records this."""
        return record in self.site.records

    def tensors(self, **tensors: Tensor) -> None:
        """What is to be measured: by name among OPERANDS, [B, heads, S, W]; empty ones are passed over."""
        found = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
        if self.wants("amax") or self.wants("nonfinite"):
            self.seen |= found
        if self.wants("fp8"):
            for row, (name, scale) in FLUSHED.items():
                if name in found:
                    tensor = finite(found[name])
                    self.parts[row] = flushed(tensor, quantise(tensor, E4M3, scale, by_column=name == "v"))

    def clips(self, output: Tensor, before: tuple[Tensor, ...] = (), after: tuple[Tensor, ...] = ()) -> None:
        """Count what the clips of the output and of dq, dk, dv touched."""
        if not self.wants("clipped"):
            return
        if self.arguments.output_clip > 0:
            bound = torch.tensor(self.arguments.output_clip, dtype=output.dtype).item()
            self.parts["clipped_outputs"] = (output.abs() >= bound).sum((0, 2, 3))
        if before and self.arguments.grad_clip_kind != "none":
            pairs = zip(before, after, strict=True)
            self.parts["clipped_gradients"] = sum(((old != new) & old.isfinite()).sum() for old, new in pairs)

    def raw(self, block: Block, raw: Tensor) -> None:
        """Scores in front of a clip, before anything is added to them."""
        if self.wants("clipped"):
            self._of("clipped_logits")[block.heads] += (raw.abs() > self.arguments.logit_clip_max).sum((0, 2, 3))

    def scores(self, block: Block, scores: Tensor) -> None:
        """S of a block, [sequences, heads, rows, keys], -inf where excluded; not kept and not changed."""
        self.sees_scores = True
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
            error = (weights.sum(-1, keepdim=True) + sink - 1).abs()
            error = error.masked_fill(dead | error.isnan(), 0.0)  # nan would stay the largest: nonfinite counts it
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

    def row_sums_of(self, row_sum: Tensor) -> None:
        """The same of a whole call, [B, H, Sq]."""
        sums, bounds = finite(row_sum).double(), self.arguments.cu_seqlens_q
        if bounds is None:
            self._sequence_sums()[:-1] = sums.sum(2)
        else:  # rows of one sequence after the other: differences of the sum up to its ends
            ends = torch.nn.functional.pad(sums[0].cumsum(1), (1, 0)).index_select(1, bounds)
            self._sequence_sums()[:-1] = ends.diff(dim=1).T

    def finish(self, upstream: Tensor | None = None, output: Tensor | None = None) -> None:
        """Hand the figures on. upstream, output: dO and O, whose products the bias is measured against."""
        if self.row_sums is not None and upstream is not None and output is not None:
            self.parts["bias_sequences"] = torch.full_like(self.row_sums[0], self.sequences)
            self.parts["bias"] = self.row_sums.sum(0)
            self.parts["bias_square"] = self.row_sums.square().sum(0)
            size = finite(upstream.float() * output.float()).abs()
            self.parts["bias_size"] = size.sum((0, 2, 3), dtype=torch.float64)
        if self.seen:
            self._magnitudes()
        if (self.parts or self.call is not None) and self.sequences:
            q = self.arguments.q
            rows = q.shape[0] * q.shape[2]
            numbers = {"sequences": self.sequences, "rows": rows, "scored_rows": rows if self.sees_scores else 0}
            self.site.add(self.parts, numbers, self.heads, q.device, is_step=upstream is not None, call=self.call)

    def _magnitudes(self) -> None:
        found = self.measure(self.seen)
        if self.wants("amax"):
            self.parts |= {f"amax_{name}": largest for name, (largest, _) in found.items()}
        if self.wants("nonfinite"):
            gradients = [strange for name, (_, strange) in found.items() if name in ("grad_q", "grad_k", "grad_v")]
            self.parts["nonfinite_outputs"] = found["output"][1]
            if gradients:
                self.parts["nonfinite_gradients"] = torch.stack(gradients).sum()

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


def magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(largest finite magnitude, elements that are not finite) by name, scalars on the device."""
    sizes = {name: tensor.abs() for name, tensor in tensors.items()}
    return {name: (finite(size).amax(), (~size.isfinite()).sum()) for name, size in sizes.items()}


def finite(tensor: Tensor, instead: float = 0.0) -> Tensor:
    """`tensor` with `instead` where it is inf or nan."""
    return torch.where(tensor.isfinite(), tensor, instead)
