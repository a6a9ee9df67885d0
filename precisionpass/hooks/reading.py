"""From totals to figures a person reads, and from figures to alarms (the thresholds are those of docs/monitors.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionpass.hooks.figures import FIGURES, FLUSHED, MAXIMA, OPERANDS, ROWS, SCORED

T_LIMIT = 6.0
"""Standard errors from zero: by chance once in a thousand million sites."""
BIAS_LIMIT = 1e-5
"""Below it a bias may have a sign and still do no harm: sound training shows t of 3 to 95 at 1e-6."""
SEQUENCES = 128
"""Fewer sequences are no sample."""
ROW_SUM_LIMIT = 1e-3


@dataclass(frozen=True)
class Alarm:
    """A figure of a site that is beyond its limit. kind: delta_bias, row_sum or nonfinite."""

    site: str
    kind: str
    message: str


def read(totals: Tensor, records: Iterable[str]) -> dict[str, float | int | list[float]]:
    """Figures by name from [len(ROWS), heads] totals on the CPU; those that are not recorded are left out.

    "sequences", "bias_sequences" beside "delta_bias" (those with a backward), and "max_logit_by_head" beside
    "max_logit" come on top of FIGURES.
    """
    row = {name: totals[position] for position, name in enumerate(ROWS)}
    found: dict[str, float | int | list[float]] = {"sequences": int(row["sequences"].max())}
    if not found["sequences"]:
        return found
    bias, t = nearest_to_alarm(row)
    rows = float(row["scored_rows"].sum())
    values: dict[str, float | int] = {
        "delta_bias": bias,
        "delta_bias_t": t,
        "row_sum_error": float(row["row_sum_error"].max()),
        "max_logit": float(row["max_logit"].max()),
        "repeated_maxima": float(row["repeats"].sum()) / max(rows, 1),
        "entropy": float(row["entropy"].sum()) / max(rows, 1),
        **{name: int(row[name].sum()) for name in ROWS if name.startswith(("clipped", "nonfinite"))},
        **{f"amax_{name}": float(row[f"amax_{name}"].max()) for name in OPERANDS},
        **{name: float(row[name].max()) for name in FLUSHED},
    }
    wanted = set(records)
    for name, figure in FIGURES.items():
        never = not rows if name in SCORED else name in MAXIMA and values[name] == -torch.inf
        no_sample = figure.record == "delta_bias" and not float(row["bias_size"].sum())
        if figure.record in wanted and not never and not no_sample:
            found[name] = values[name]
    if "delta_bias" in found:
        found["bias_sequences"] = int(row["bias_sequences"].max())
    if "max_logit" in found:
        found["max_logit_by_head"] = row["max_logit"].tolist()
    return found


def nearest_to_alarm(row: Mapping[str, Tensor]) -> tuple[float, float]:
    """(bias, t) of the head whose lesser share of both limits is the largest; (0, 0) without a sample of two."""
    count = row["bias_sequences"]
    mean = row["bias"] / count.clamp(min=1)
    variance = (row["bias_square"] - count * mean.square()) / (count - 1).clamp(min=1)
    error = (variance.clamp(min=0) / count.clamp(min=1)).sqrt()
    # Equal sums in every sequence have no spread: one that is not zero is then as far from zero as can be.
    t = torch.where(mean == 0, 0.0, mean.abs() / error.clamp(min=1e-300)).masked_fill(count < 2, 0.0)
    bias = row["bias"].abs() / row["bias_size"].clamp(min=1e-300)
    worst = int(torch.minimum(t / T_LIMIT, bias / BIAS_LIMIT).argmax())
    return float(bias[worst]), float(t[worst])


def alarms(site: str, figures: Mapping[str, object], raises: bool = False) -> list[Alarm]:
    """What is wrong with a site, by its figures. raises: a gradient that is not finite counts."""
    found = []
    sequences = figures.get("bias_sequences", 0)
    bias, t = figures.get("delta_bias", 0.0), figures.get("delta_bias_t", 0.0)
    if sequences >= SEQUENCES and t > T_LIMIT and bias > BIAS_LIMIT:  # type: ignore[operator]
        what = f"the gradient has a bias of {bias:.1e}, {t:.0f} standard errors from 0 over {sequences} sequences"
        found.append(Alarm(site, "delta_bias", what))
    error = figures.get("row_sum_error", 0.0)
    if error > ROW_SUM_LIMIT:  # type: ignore[operator]
        found.append(Alarm(site, "row_sum", f"a row of probabilities misses 1 by {error:.1e}"))
    if raises and figures.get("nonfinite_gradients"):
        what = f"{figures['nonfinite_gradients']} elements of its gradients are inf or nan (on_nonfinite: raise)"
        found.append(Alarm(site, "nonfinite", what))
    return found
