"""What the runs of one recipe came to: a row for every arithmetic and seed, against FP32 attention of the same seed."""

from __future__ import annotations

from statistics import mean
from typing import Any

Record = dict[str, Any]


def rows(records: dict[str, list[Record]]) -> list[dict[str, Any]]:
    """A row for every arithmetic and seed.

    onset_1.5, onset_3: the first probe at which a layer's |W_Q| is that many times FP32's largest at the same step.
    """
    exact = {record["seed"]: record for record in records.get("float32", [])}
    found = []
    for name, runs in records.items():
        for run in runs:
            oracle = exact.get(run["seed"])
            found.append(
                {
                    "arithmetic": name,
                    "seed": run["seed"],
                    "steps": run["step"][-1],
                    "query_norm": max(run["query_norm"][-1]),
                    "key_norm": max(run["key_norm"][-1]),
                    "max_logit": largest(run["max_logit"][-1]),
                    "peak_logit": max(largest(one) for one in run["max_logit"]),
                    "onset_1.5": onset(run, oracle, 1.5),
                    "onset_3": onset(run, oracle, 3.0),
                    "alarm": first_alarm(run),
                    "loss": run["loss"][-1],
                    "loss_difference": None if oracle is None else run["loss"][-1] - oracle["loss"][-1],
                }
            )
    return found


def largest(by_layer: list[list[float]]) -> float:
    return max(max(layer) for layer in by_layer)


def onset(run: Record, oracle: Record | None, factor: float) -> int | None:
    """The first step at which the run's largest |W_Q| passes `factor` times the oracle's."""
    if oracle is None:
        return None
    pairs = zip(run["step"], run["query_norm"], oracle["query_norm"], strict=False)
    return next((step for step, mine, exact in pairs if not max(mine) <= factor * max(exact)), None)


def first_alarm(run: Record) -> int | None:
    """The first probe at which a site's bias was beyond the monitor's limits."""
    return next((step for step, count in zip(run["step"], run.get("alarms", []), strict=False) if count), None)


def table(found: list[dict[str, Any]]) -> str:
    """One line an arithmetic: the range over its seeds."""
    lines = [
        f"{'arithmetic':<17}{'seeds':>6}{'|W_Q| at the end':>18}{'peak logit':>22}{'3x FP32 in':>12}{'first at':>10}"
        f"{'alarm in':>10}{'first at':>10}   loss - FP32"
    ]
    for name in dict.fromkeys(row["arithmetic"] for row in found):
        mine = [row for row in found if row["arithmetic"] == name]
        onsets = [row["onset_3"] for row in mine if row["onset_3"] is not None]
        alarms = [row["alarm"] for row in mine if row["alarm"] is not None]
        apart = [row["loss_difference"] for row in mine if row["loss_difference"] is not None]
        lines.append(
            f"{name:<17}{len(mine):>6}{span(row['query_norm'] for row in mine):>18}"
            f"{span(row['peak_logit'] for row in mine):>22}{f'{len(onsets)} of {len(mine)}':>12}"
            f"{min(onsets, default='-'):>10}{f'{len(alarms)} of {len(mine)}':>10}{min(alarms, default='-'):>10}"
            + (f"{mean(apart):>+8.3f} ({min(apart):+.3f} .. {max(apart):+.3f})" if apart else "")
        )
    return "\n".join(lines)


def span(values) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.3g} .. {ordered[-1]:.3g}"
