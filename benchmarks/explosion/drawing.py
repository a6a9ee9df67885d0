"""The runs of one recipe as curves: the largest |W_Q| over the steps, a line for every arithmetic and seed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from plots import WIDTH, document, scale, text, title

COLOURS = {
    "float32": "#6e7781", "flash": "#d4493f", "cudnn": "#c07a1a", "ours": "#2e9e5b", "ours-recompute": "#2a7bd1",
    "ours-escalating": "#12a3a3",
    "ours-flash-style": "#b0489a", "ours-paper-shift": "#8f66c9", "all-bf16": "#8a6d3b",
}  # fmt: skip
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 64, 170, 46, 46


def curves(records: dict[str, list[dict[str, Any]]]) -> str:
    """An SVG document; both axes named, |W_Q| on a logarithmic one."""
    runs = [run for found in records.values() for run in found]
    values = [max(norms) for run in runs for norms in run["query_norm"] if math.isfinite(max(norms))]
    low, high = math.floor(math.log10(min(values)) * 2) / 2, math.ceil(math.log10(max(values)) * 2) / 2
    last = max(run["step"][-1] for run in runs)
    x, y = scale(0, last, LEFT, WIDTH - RIGHT), scale(low, max(high, low + 0.5), HEIGHT - BOTTOM, TOP)
    parts = [title("Largest spectral norm of W_Q while training")]
    for mark in (m * 10**p for p in range(-2, 4) for m in (1, 2, 5)):
        if low <= math.log10(mark) <= high:
            at = y(math.log10(mark))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(text(LEFT - 8, at + 4, f"{mark:g}", "end"))
    for quarter in range(5):
        parts.append(text(x(last * quarter / 4), HEIGHT - BOTTOM + 20, f"{last * quarter // 4}", "middle"))
    for row, (name, found) in enumerate(records.items()):
        for run in found:
            places = " ".join(
                f"{x(step):.1f},{y(math.log10(max(norms))):.1f}"
                for step, norms in zip(run["step"], run["query_norm"], strict=True)
                if math.isfinite(max(norms))
            )
            parts.append(
                f'<polyline points="{places}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8" opacity="0.8"/>'
            )
        at = TOP + 18 * row + 8
        parts.append(f'<circle cx="{WIDTH - RIGHT + 18}" cy="{at - 4}" r="5" fill="{COLOURS[name]}"/>')
        parts.append(text(WIDTH - RIGHT + 30, at, name, "start"))
    parts.append(text(LEFT, HEIGHT - 8, "steps; a line for every seed", "start", "quiet"))
    return document(HEIGHT, "Spectral norm of the query weights over training, by attention arithmetic", parts)
