"""The calls of a site as a drawing: boxes in layers, data flowing down. Plain SVG, the same for the same calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from precisionpass.review.plain import shown

if TYPE_CHECKING:
    from precisionpass.review.report import Call

MOST_CALLS = 60
LETTER, LINE, PAD = 6.8, 16, 9  # of the 11 px type that page.css sets
GAP, FALL = 18, 30  # between boxes of a layer, between layers
SWEEPS = 24
OF_A_GIVEN = 0.05


@dataclass(eq=False)
class Box:
    """A call, or (without lines) a bend of an edge that passes a layer."""

    lines: tuple[str, ...]
    style: str
    layer: int = 0
    x: float = 0.0  # of the middle
    above: list[Box] = field(default_factory=list)
    below: list[Box] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max(len(line) for line in self.lines) * LETTER + 2 * PAD if self.lines else 2.0

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + PAD if self.lines else 0.0


def svg(calls: Sequence[Call], label: str, style: str = "call") -> str:
    """The drawing as an <svg> element with this label for who cannot see it; "" for no calls or too many to draw.

    style: the class of every call's box; what comes from elsewhere has the class "given".
    """
    if not calls or len(calls) > MOST_CALLS:
        return ""
    layers = _ordered(_layers(_boxes(calls, style)))
    _place(layers)
    tops = _tops(layers)
    left = min(box.x - box.width / 2 for layer in layers for box in layer) - 2
    for box in (box for layer in layers for box in layer):
        box.x -= left
    width = max(box.x + box.width / 2 for layer in layers for box in layer) + 2
    height = tops[-1] + max(box.height for box in layers[-1]) + 2
    parts = [_edge(box, tops) for layer in layers for box in layer if box.lines]
    parts += [_drawn(box, tops[box.layer]) for layer in layers for box in layer if box.lines]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.1f} {height:.1f}"'
    return f'<svg role="img" aria-label="{escape(label)}" {size}>{"".join(parts)}</svg>'


def _boxes(calls: Sequence[Call], style: str) -> list[Box]:
    """A box for every call, layered by the longest way to it; what comes from elsewhere right above its first use."""
    made: dict[str, Box] = {}
    for call in calls:
        first, tuple_, _ = call.type.partition("], ")
        kind = f"{first.lstrip('(')}], ..." if call.type[:1] == "(" and tuple_ else call.type
        lines = tuple(shown(line, 34) for line in (call.label or call.name, *call.details, kind) if line)
        box = Box(lines, style if call.text else "given")
        made[call.name] = box
        for name in dict.fromkeys(call.reads):
            if name in made and made[name] is not box:
                made[name].below.append(box)
                box.above.append(made[name])
        box.layer = max((one.layer + 1 for one in box.above), default=0)
    for box in made.values():
        if not box.above and box.below:
            box.layer = min(one.layer for one in box.below) - 1
    return list(made.values())


def _layers(boxes: list[Box]) -> list[list[Box]]:
    """Boxes by layer, with a bend in every layer that an edge passes."""
    first = min(box.layer for box in boxes)
    layers: list[list[Box]] = [[] for _ in range(max(box.layer for box in boxes) - first + 1)]
    for box in boxes:
        box.layer -= first
        layers[box.layer].append(box)
    for box in boxes:
        for position, reader in enumerate(list(box.below)):
            last = box
            for layer in range(box.layer + 1, reader.layer):
                bend = Box((), "", layer, above=[last])
                layers[layer].append(bend)
                last.below = [*last.below[:position], bend, *last.below[position + 1 :]] if last is box else [bend]
                last = bend
            if last is not box:
                last.below = [reader]
                reader.above[reader.above.index(box)] = last
    return layers


def _ordered(layers: list[list[Box]]) -> list[list[Box]]:
    """Each layer in an order with few crossings: every box at the mean place of its neighbours, sweep after sweep."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            places = {id(box): place for near in layers for place, box in enumerate(near)}
            wanted = {}
            for place, box in enumerate(layer):
                near = box.above if down else box.below
                wanted[id(box)] = sum(places[id(one)] for one in near) / len(near) if near else place
            layer.sort(key=lambda box: wanted[id(box)])
    return layers


def _place(layers: list[list[Box]]) -> None:
    """Middles of the boxes: near those they are joined to, never overlapping."""
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _spread(layer, [_wanted(box) for box in layer])


def _wanted(box: Box) -> float:
    """The mean place of what a box is joined to. What comes from elsewhere hardly counts: chains stay straight."""
    near = [(one, OF_A_GIVEN if one.style == "given" else 1.0) for one in (*box.above, *box.below)]
    return sum(one.x * weight for one, weight in near) / sum(weight for _, weight in near) if near else box.x


def _spread(layer: list[Box], wanted: list[float]) -> None:
    """Boxes from left to right in their order, as near to where they are wanted as their widths allow."""
    runs: list[tuple[list[Box], float]] = []  # boxes that touch, and where the middle of the first is wanted
    for box, place in zip(layer, wanted, strict=True):
        run, start = [box], place
        while runs and start < runs[-1][1] + _length(runs[-1][0]) + _between(runs[-1][0][-1], run[0]):
            earlier, before = runs.pop()
            shift = _length(earlier) + _between(earlier[-1], run[0])
            start = (before * len(earlier) + (start - shift) * len(run)) / (len(earlier) + len(run))
            run = earlier + run
        runs.append((run, start))
    for run, start in runs:
        for position, box in enumerate(run):
            box.x = start + _length(run[: position + 1])


def _length(run: list[Box]) -> float:
    """From the middle of the first box to that of the last, where they touch."""
    return sum(_between(one, other) for one, other in itertools.pairwise(run))


def _between(one: Box, other: Box) -> float:
    return (one.width + other.width) / 2 + GAP


def _tops(layers: list[list[Box]]) -> list[float]:
    tops, top = [], 2.0
    for layer in layers:
        tops.append(top)
        top += max(box.height for box in layer) + FALL
    return tops


def _edge(box: Box, tops: list[float]) -> str:
    """The lines from a box to all that read it, each with its arrow head."""
    drawn = []
    for reader in box.below:
        x, y = box.x, tops[box.layer] + box.height
        path = [f"M{x:.1f} {y:.1f}"]
        while True:
            end = tops[reader.layer] - (0 if not reader.lines else 5)
            middle = (y + end) / 2
            path.append(f"C{x:.1f} {middle:.1f} {reader.x:.1f} {middle:.1f} {reader.x:.1f} {end:.1f}")
            if reader.lines:
                break
            x, y, reader = reader.x, end, reader.below[0]
        tip = f"M{reader.x - 4:.1f} {end:.1f}h8l-4 5z"
        drawn.append(f'<path class="edge" d="{"".join(path)}"/><path class="tip" d="{tip}"/>')
    return "".join(drawn)


def _drawn(box: Box, top: float) -> str:
    corner = box.height / 2 if box.style == "given" else 4
    parts = [
        f'<rect x="{box.x - box.width / 2:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{corner:.1f}"/>'
    ]
    for position, line in enumerate(box.lines):
        style = "name" if position == 0 else "detail"
        y = top + PAD / 2 + LINE * (position + 0.72)
        parts.append(f'<text class="{style}" x="{box.x:.1f}" y="{y:.1f}">{escape(line)}</text>')
    return f'<g class="{box.style}">{"".join(parts)}</g>'
