"""The plots of docs/numerics.md, measured and drawn anew: python benchmarks/plots.py (some three minutes on one core).

docs/bias.svg: the bias of every input that makes training fail, for four arithmetics. docs/drift.svg: how far W_Q runs
from float64's, step by step. Both on the CPU reference, which is the specification, with the inputs of bias.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bias import ARITHMETICS, INPUTS, measured

from precisionpass.numerics.bias import drift
from precisionpass.numerics.budgets import BIAS, DRIFT

DOCS = Path(__file__).parents[1] / "docs"
SEEDS = (0, 1, 2)
STEPS = (10, 20, 40, 80, 160)
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 150, 30, 46, 52
COLOURS = ("#2e9e5b", "#c07a1a", "#d4493f", "#8f66c9")  # seen on white and on black
STYLE = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
.quiet { fill: #59636e; } .title { font-weight: 600; font-size: 15px; }
line { stroke: #c5ccd3; } .limit { stroke: #59636e; stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ec; } .quiet { fill: #a5b0bb; } line { stroke: #3b444d; } .limit { stroke: #a5b0bb; }
}"""


def main() -> None:
    points = {
        name: [found.bias for cases in INPUTS.values() for found in measured(attend, cases, SEEDS)]
        for name, attend in ARITHMETICS.items()
    }
    (DOCS / "bias.svg").write_text(strips(points, BIAS), encoding="utf-8")
    curves = {name: [drift(attend, steps=steps) for steps in STEPS] for name, attend in ARITHMETICS.items()}
    (DOCS / "drift.svg").write_text(lines(curves, STEPS, DRIFT), encoding="utf-8")


def strips(points: Mapping[str, Sequence[float]], limit: float) -> str:
    """A row of dots for each name, on one logarithmic axis, and the limit that the tests hold."""
    low, high = -10, -2
    height = TOP + 44 * len(points) + BOTTOM
    x = scale(low, high, LEFT, WIDTH - RIGHT)
    parts = [title("Bias of attention: |mean rowsum dS| / mean sum |dO| P|V|, 0 in exact arithmetic")]
    for power in range(low, high + 1):
        parts.append(f'<line x1="{x(power):.1f}" x2="{x(power):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(text(x(power), height - BOTTOM + 20, f"1e{power}", "middle", "quiet"))
    parts.append(marked(x(math.log10(limit)), TOP - 4, height - BOTTOM, f"limit of the tests {limit:.0e}"))
    for row, (name, values) in enumerate(points.items()):
        y = TOP + 44 * row + 24
        parts.append(text(LEFT - 14, y + 4, name, "end"))
        for value in values:
            at = x(min(max(math.log10(value) if value > 0 else low, low), high))
            parts.append(f'<circle cx="{at:.1f}" cy="{y}" r="5" fill="{COLOURS[row]}" fill-opacity="0.55"/>')
    parts.append(text(LEFT, height - 10, "one dot an input and seed; further left is better", "start", "quiet"))
    return document(height, "Bias of four arithmetics on inputs that make training fail", parts)


def lines(curves: Mapping[str, Sequence[float]], steps: Sequence[int], limit: float) -> str:
    """A curve for each name over the steps, both axes logarithmic, with the limit that the tests hold."""
    low, high, height = -7, 0, 360
    x = scale(math.log10(steps[0]), math.log10(steps[-1]), 70, WIDTH - 150)
    y = scale(low, high, height - BOTTOM, TOP)
    parts = [title("Drift of W_Q from float64's (spectral norm), steps of SGD on a twin sink")]
    for power in range(low, high + 1):
        parts.append(f'<line x1="70" x2="{WIDTH - 150}" y1="{y(power):.1f}" y2="{y(power):.1f}"/>')
        parts.append(text(60, y(power) + 4, f"1e{power}", "end", "quiet"))
    for step in steps:
        parts.append(text(x(math.log10(step)), height - BOTTOM + 20, str(step), "middle", "quiet"))
    at = y(math.log10(limit))
    parts.append(f'<line class="limit" x1="70" x2="{WIDTH - 150}" y1="{at:.1f}" y2="{at:.1f}"/>')
    parts.append(text(76, at - 6, f"limit of the tests {limit:.0e}", "start", "quiet"))
    taken: list[float] = []  # heights of the names so far: none on another
    for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
        places = [
            f"{x(math.log10(step)):.1f},{y(max(math.log10(value), low)):.1f}"
            for step, value in zip(steps, values, strict=True)
        ]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="4" fill="{colour}"/>' for p in places]
        at = float(places[-1].split(",")[1]) + 4
        while any(abs(at - other) < 14 for other in taken):
            at -= 1
        taken.append(at)
        parts.append(text(WIDTH - 140, at, name, "start"))
    parts.append(text(70, height - 10, "steps", "start", "quiet"))
    return document(height, "Drift of W_Q of four arithmetics over the steps of a training run", parts)


def scale(low: float, high: float, start: float, end: float):
    """From a value to its place."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>'


def title(words: str) -> str:
    return text(14, 24, words, "start", "title")


def marked(x: float, top: float, bottom: float, words: str) -> str:
    return f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>' + text(
        x + 6, top + 14, words, "start", "quiet"
    )


def document(height: float, label: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
