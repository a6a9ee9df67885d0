import json
import subprocess
import sys
from dataclasses import replace
from enum import IntEnum, StrEnum
from types import MappingProxyType

import pytest

from precisionpass.review.plain import plain
from precisionpass.review.report import SCHEMA_VERSION, NearMissRecord, Report, SiteRecord
from tests.review import gpt2


def test_json_of_a_small_report(golden):
    golden("gpt2_one_layer.json", gpt2.report(layers=1).to_json())


def test_json_holds_every_field_but_times_artifacts_and_calls():
    content = json.loads(gpt2.report().to_json())
    assert content["schema_version"] == SCHEMA_VERSION
    assert set(content) == {"schema_version", *Report.__dataclass_fields__} - {"seconds", "artifacts"}
    assert set(content["sites"][0]) == set(SiteRecord.__dataclass_fields__) - {"calls"}
    assert set(content["near_misses"][0]) == set(NearMissRecord.__dataclass_fields__)


def test_times_and_artifacts_do_not_make_reports_different():
    assert replace(gpt2.report(), seconds=9.0, artifacts={}) == gpt2.report()
    assert replace(gpt2.report(), seconds=9.0, artifacts={}).to_json() == gpt2.report().to_json()


def test_json_has_no_infinities_and_no_addresses():
    facts = {"limit": float("-inf"), "nothing": float("nan"), "thing": object()}
    text = replace(gpt2.report(), sites=(replace(gpt2.attention(0), facts=facts),)).to_json()
    held = json.loads(text, parse_constant=pytest.fail)["sites"][0]["facts"]
    assert held == {"limit": "-inf", "nothing": "nan", "thing": "<object object>"}


def test_plain_values():
    class Size(IntEnum):
        SMALL = 3

    class Word(StrEnum):
        ROUNDED = "rounded"

    values = MappingProxyType({"a": (1, [2.5, None]), "b": Size.SMALL, "c": Word.ROUNDED, 4: True})
    assert json.dumps(plain(values)) == '{"a": [1, [2.5, null]], "b": 3, "c": "rounded", "4": true}'


def test_merging_numbers_the_graphs_on():
    child = replace(gpt2.attention(1), graph="0.2")
    first = replace(gpt2.report(), sites=(gpt2.attention(0), child), graphs=1, unused_rules=("a", "b"))
    second = replace(
        gpt2.report(), sites=(gpt2.attention(2), replace(child, graph="1.0")), graphs=2, unused_rules=("b",)
    )
    merged = Report.merge([first, second])
    assert [site.graph for site in merged.sites] == ["0", "0.2", "1", "2.0"]
    assert [miss.graph for miss in merged.near_misses] == ["0", "1"]
    assert sorted(merged.artifacts) == [
        f"graph_{n}.{kind}" for n in (0, 1) for kind in ("after.py", "before.py", "diff")
    ]
    assert (merged.graphs, merged.nodes, merged.seconds) == (3, 2 * 612, 3.0)
    assert merged.unused_rules == ("b",)
    assert len(merged.events) == 4


def test_merging_one_report_or_none_changes_nothing():
    assert Report.merge([]) == Report()
    assert Report.merge([gpt2.report()]) == gpt2.report()


def test_reports_of_different_rules_do_not_merge():
    with pytest.raises(ValueError, match="different rules cannot be merged: stable-bf16, watch"):
        Report.merge([gpt2.report(), replace(gpt2.report(), rules_name="watch", rules_digest="00")])


def test_reports_need_neither_torch_nor_rich():
    code = "import sys, precisionpass.review.report; print({'torch', 'sympy', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
