import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precisionpass.review.drawing import MOST_CALLS, svg
from precisionpass.review.report import Call
from tests.review.test_text import HOSTILE


def boxes(source: str) -> list[tuple[float, float, float, float]]:
    """(left, top, width, height) of every box, and that all of the drawing lies within its view."""
    drawing = ElementTree.fromstring(source)
    left, top, width, height = map(float, drawing.attrib["viewBox"].split())
    found = [
        tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height")) for rect in drawing.iterfind(".//rect")
    ]
    for x, y, w, h in found:
        assert left <= x and x + w <= left + width and top <= y and y + h <= top + height
    return found


@st.composite
def graphs(draw) -> list[Call]:
    calls = []
    for position in range(draw(st.integers(1, 20))):
        reads = draw(st.lists(st.integers(0, max(0, position - 1)), max_size=3)) if position else []
        calls.append(Call(f"n{position}", "f()" if reads else "", "bf16[2]", tuple(f"n{r}" for r in reads), "f"))
    return calls


@given(graphs())
@settings(deadline=None)
def test_every_call_has_a_box_no_two_overlap_and_data_flows_down(calls):
    source = svg(calls, "label")
    found = boxes(source)
    assert len(found) == len(calls)
    for (x, y, w, h), (u, v, width, height) in combinations(found, 2):
        assert x + w <= u or u + width <= x or y + h <= v or v + height <= y
    edges = sum(len(set(call.reads)) for call in calls)
    assert source.count('class="tip"') == edges
    for path in re.findall(r'class="edge" d="M[-\d.]+ ([-\d.]+).* ([-\d.]+)"/><path class="tip"', source):
        assert float(path[0]) < float(path[1])


def test_the_words_of_a_call_are_in_its_box():
    source = svg([Call("q", "", "bf16[4]"), Call("y", "f(q)", "fp32[4]", ("q",), "f", ("scale=2",))], "a", "new")
    assert re.findall(r">([^<]+)</text>", source) == ["q", "bf16[4]", "f", "scale=2", "fp32[4]"]
    assert re.findall(r'<g class="(\w+)">', source) == ["given", "new"]
    assert svg([Call("q", "", "bf16[4]")], "a") == svg([Call("q", "", "bf16[4]")], "a")


@pytest.mark.parametrize("count", [0, MOST_CALLS + 1])
def test_nothing_and_too_much_are_not_drawn(count):
    assert svg([Call(f"n{n}", "f()", "") for n in range(count)], "label") == ""


def test_hostile_names_stay_text():
    source = svg([Call(HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, (HOSTILE,))], HOSTILE.replace("\0", ""))
    assert "<script" not in source and "&lt;script&gt;" in source
    assert len(source) < 30_000
