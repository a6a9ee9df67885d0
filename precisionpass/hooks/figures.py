"""The figures a site can record, as plain data: what rules may name, what is added up, and what a person reads.

Imports nothing heavy: the rules language reads the names from here.
"""

from __future__ import annotations

from dataclasses import dataclass

RECORDS = {
    "delta_bias": "the bias of delta: mean and t of rowsum dS, which is 0 in exact arithmetic",
    "row_sum": "how far a row of P is from summing to 1 in the backward",
    "max_logit": "the largest score of each head",
    "repeated_maxima": "the share of rows whose largest score stands at more than one key",
    "entropy": "the mean entropy of a row of P, in nats",
    "clipped": "how many scores, outputs and gradients a clip of the rules changed",
    "amax": "the largest magnitude of each operand",
    "nonfinite": "how many outputs and gradients are inf or nan",
    "fp8": "how much of q, k and v FP8 (e4m3) would flush to zero, with one scale a head and with one a row",
}
"""What `record` may name."""

SUMS = (
    "sequences",
    "rows",
    "scored_rows",
    "bias_sequences",
    "bias",
    "bias_square",
    "bias_size",
    "repeats",
    "entropy",
    "clipped_logits",
    "clipped_outputs",
    "clipped_gradients",
    "nonfinite_outputs",
    "nonfinite_gradients",
)
OPERANDS = ("q", "k", "v", "output", "grad_output", "grad_q", "grad_k", "grad_v")
FLUSHED = {f"flushed_{name}_by_{scale}": (name, scale) for name in ("q", "k", "v") for scale in ("head", "row")}
MAXIMA = ("max_logit", "row_sum_error", *(f"amax_{name}" for name in OPERANDS), *FLUSHED)
ROWS = (*SUMS, *MAXIMA)
"""The rows of a site's totals, each with one column a head: first those that add up, then those of the largest."""

SCORED = ("repeated_maxima", "entropy", "clipped_logits")
"""Figures of every score: only an implementation that walks over them all has any."""

WHOLE = (
    "clipped_gradients", "nonfinite_outputs", "nonfinite_gradients", *(f"amax_{name}" for name in OPERANDS), *FLUSHED
)  # fmt: skip
"""Rows of a whole tensor, kept in the first column: gradients of keys have another number of heads."""


@dataclass(frozen=True)
class Figure:
    """A number that is read: which `record` makes it, and what it means."""

    record: str
    meaning: str


FIGURES = {
    "delta_bias": Figure("delta_bias", "mean of rowsum dS relative to that of rowsum |dO||O|, of the head nearest to "
                         "the alarm"),
    "delta_bias_t": Figure("delta_bias", "standard errors from zero of that mean over sequences, without its sign"),
    "row_sum_error": Figure("row_sum", "largest |rowsum P - 1| of the backward"),
    "max_logit": Figure("max_logit", "largest score of any head, after clips, bias and masks"),
    "repeated_maxima": Figure("repeated_maxima", "share of rows whose maximum stands at several keys"),
    "entropy": Figure("entropy", "mean entropy of a row, in nats"),
    "clipped_logits": Figure("clipped", "scores beyond logit_clip"),
    "clipped_outputs": Figure("clipped", "outputs at output_clip"),
    "clipped_gradients": Figure("clipped", "elements of dq, dk, dv that grad_clip changed"),
    **{f"amax_{name}": Figure("amax", f"largest magnitude of {name}") for name in OPERANDS},
    "nonfinite_outputs": Figure("nonfinite", "outputs that are inf or nan"),
    "nonfinite_gradients": Figure("nonfinite", "elements of dq, dk, dv that are inf or nan, before any clip"),
    **{row: Figure("fp8", f"largest share of {name} in a call that e4m3 flushes to zero, scaled by {scale}")
       for row, (name, scale) in FLUSHED.items()},
}  # fmt: skip
"""What `monitor.read()` gives for a site, and what `escalate: when` may ask."""
