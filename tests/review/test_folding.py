from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precisionpass.review.folding import fold_integers, fold_names, fold_sources, group_records, unfold
from tests.review import gpt2


@pytest.mark.parametrize(
    ("numbers", "folded"),
    [([], ""), ([4], "4"), ([0, 1, 2, 3, 5], "0-3,5"), ([7, 1, 2, 2], "1-2,7"), (range(100), "0-99")],
)
def test_integers_fold_to_ranges_with_gaps(numbers, folded):
    assert fold_integers(numbers) == folded


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["h.0", "h.1", "h.2"], ["h.{0-2}"]),
        (["h.0", "h.1", "h.2", "h.5"], ["h.{0-2,5}"]),
        (["h.7.attn"], ["h.7.attn"]),
        (["a.0", "b.0", "a.1"], ["a.{0-1}", "b.0"]),
        (["", ""], [""]),
        ([f"block.{i}.layer.{j}" for i, j in product(range(3), (0, 2))], ["block.{0-2}.layer.{0,2}"]),
        (["x.0.0", "x.0.1", "x.1.0"], ["x.0.{0-1}", "x.1.0"]),
        (["h.01", "h.02"], ["h.01", "h.02"]),
        (["h." + "9" * 5000], ["h." + "9" * 5000]),
        (["h.٣"], ["h.٣"]),
    ],
)
def test_names_that_differ_only_in_integers_fold(names, folded):
    assert list(fold_names(names)) == folded


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))))
def test_folding_names_loses_and_invents_nothing(points):
    names = [f"a.{i}.b.{j}.c{k}" for i, j, k in points]
    assert sorted(name for pattern in fold_names(names) for name in unfold(pattern)) == sorted(names)


@pytest.mark.parametrize(
    ("folded", "names"),
    [
        ("h.{0-1,3}.attn", ["h.0.attn", "h.1.attn", "h.3.attn"]),
        ("**.attn", ["**.attn"]),
        ("*.{2}.b{0-1}", ["*.2.b0", "*.2.b1"]),
        ("{a}.{}.{1-}.{-1}.{1,}", ["{a}.{}.{1-}.{-1}.{1,}"]),
        ("h.{3-1}", []),
    ],
)
def test_what_a_folded_name_stands_for(folded, names):
    assert list(unfold(folded)) == names


@pytest.mark.parametrize("folded", ["{0-999999999}", "{0-99}" * 3, "{1-9999,1-9999}", "{0-9}" * 9000])
def test_too_many_names_are_refused(folded):
    with pytest.raises(ValueError, match="more than 10000 names"):
        unfold(folded)


def test_sources_fold_by_file():
    assert fold_sources(["a.py:3", "b.py:1", "a.py:7", "a.py:8", "", "<string>"]) == "a.py:3,7-8 b.py:1 <string>"


def test_identical_sites_are_one_group():
    attention, norms = group_records(gpt2.attention(i) for i in range(3)), group_records(gpt2.report().sites)
    assert [(group.names, group.count) for group in attention] == [(("transformer.h.{0-2}.attn",), 3)]
    assert [group.count for group in norms] == [25, 12]


@pytest.mark.parametrize(
    "change", [{"decision": "refused"}, {"facts": {"heads": 8}}, {"rule": "other"}, {"formula": "x"}]
)
def test_sites_that_differ_in_content_are_not_folded(change):
    assert len(group_records([gpt2.attention(0), replace(gpt2.attention(1), **change)])) == 2


def test_a_record_that_stands_for_several_sites_counts_as_several():
    (group,) = group_records([replace(gpt2.attention(0), count=6), replace(gpt2.attention(0), count=2, graph="1")])
    assert (group.count, group.graphs) == (8, "{0-1}")
