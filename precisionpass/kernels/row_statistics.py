"""What the kernels of an attention's backward know of each row, and who makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precisionpass.kernels import tuning
from precisionpass.kernels.launch import Plan
from precisionpass.kernels.variant import Variant

if TYPE_CHECKING:
    from precisionpass.ops.arguments import Gradients, Saved

ROWS_PADDED = 128


class RowStatistics:
    """FP32 statistics of each row that every kernel of the backward reads, and which heads hold a dead row.

    records: also what the kernel of dQ leaves of each row. first: they are to be made before any other kernel runs.

    [B, H, Sq padded to a multiple of the longest tile]: kernels load whole, aligned tiles and test for no end.
    """

    def __init__(
        self, plan: Plan, gradients: Gradients, saved: Saved, upstream: Tensor, *, records: bool, first: bool
    ) -> None:
        arguments = plan.arguments
        self.arguments, self.saved, self.upstream = arguments, saved, upstream
        self.residual = saved.residual if arguments.delta == "residual" and saved.has_residual else None
        missing = arguments.delta == "residual" and self.residual is None
        # What arrives through P joins dP, whose mean is not in the output: delta has to be summed anew.
        self.recompute = arguments.delta == "recompute" or missing or gradients.probabilities is not None
        self.lse_gradient = gradients.lse.to(torch.float32).contiguous() if gradients.lse is not None else None
        nan, self.corrected = plan.variant["dead_rows_nan"], Variant(**plan.variant).corrected
        covers = plan.tile(tuning.QUERY).query_block >= plan.tile(tuning.KEY_VALUE).query_block
        apart = first or self.recompute or self.corrected or nan or arguments.packed
        self.made_by_query = gradients.needs[0] and covers and not apart
        self.settings = {"residual": self.residual is not None, "log_sum_gradient": self.lse_gradient is not None}
        self.padded_count = -(-plan.query_count // ROWS_PADDED) * ROWS_PADDED
        shape = (plan.batch, plan.heads, self.padded_count)
        self.delta = torch.empty(shape, dtype=torch.float32, device=upstream.device)
        self.shift = torch.empty_like(self.delta)
        self.correction = torch.empty_like(self.delta) if self.corrected else None
        self.dead_heads = torch.zeros(shape[:2], dtype=torch.int32, device=upstream.device) if nan else None
        # Of packed sequences no kernel visits the rows past the last one.
        made = torch.zeros_like if arguments.packed else torch.empty_like
        self.sums = made(self.delta) if records and gradients.needs[0] else None
        self.sizes = made(self.delta) if records and self.made_by_query else None

    def recorded(self) -> tuple[Tensor | None, Tensor | None]:
        """rowsum dS and rowsum |dO * O|, where the kernel of dQ is to leave them."""
        return self.sums, self.sizes

    def statistics(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """shift, delta, correction and the rows of each, in the kernels' order."""
        return self.shift, self.delta, self.correction, self.padded_count
