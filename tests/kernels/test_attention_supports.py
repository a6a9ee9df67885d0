"""What the kernels refuse, and how they say it: the words reach a user through the review."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from precisionpass.kernels.attention import supports
from tests.kernels.compiling import example

PACKED = {name: torch.tensor([0, 100, 256], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}


def test_an_ordinary_attention_is_supported():
    assert supports(example()) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"score": " + ".join(f"exp(s / {number}) * tanh(s)" for number in range(1, 90))},
            "the kernels take score expressions of at most 400 operations, their slopes included",
        ),
        (PACKED | {"bias": torch.zeros(1, 1, 256, 256)}, "the kernels take no bias over packed sequences"),
        (PACKED | {"probabilities": "softmax"}, "the kernels do not return the probabilities of packed sequences"),
        (
            PACKED | {"dead_rows": "nan"},
            'the kernels give rows of packed sequences without a key 0, not dead_rows="nan"',
        ),
    ],
)
def test_a_setting_without_a_kernel_is_named(change, reason):
    assert supports(replace(example(), **change)) == reason


def test_gradients_of_score_inputs_are_refused_over_packed_sequences():
    attention, needs = replace(example(), score="s + t0", score_inputs=(torch.zeros(1, 1, 1, 1),)), (True,) * 6
    assert supports(attention, needs) is None and supports(replace(attention, **PACKED)) is None
    reason = "the kernels have no gradients of score inputs over packed sequences"
    assert supports(replace(attention, **PACKED), needs) == reason


def test_float64_and_wide_heads_are_refused_in_words():
    assert supports(example(dtype=torch.float64)) == (
        "the kernels compute in bfloat16, float16 and float32, not float64"
    )
    assert supports(example(width=320)) == "the kernels take head dimensions up to 256, not 320"


def test_a_rule_for_dead_rows_costs_nothing_where_there_are_none():
    """Causality from the top left leaves every row a key: what a model compiles to is what `zero` compiles to."""
    from precisionpass.kernels.launch import Plan
    from tests.kernels.compiling import compiling_for, example

    with compiling_for("sm_90"):
        kept, zero = (Plan(example(causal="top_left", dead_rows=rule)).variant for rule in ("nan", "zero"))
        assert kept == zero
        masked = Plan(example(mask=(1, 1, 256, 256), dead_rows="nan"))
        assert masked.variant["dead_rows_nan"] and masked.variant["surveyed"]


@pytest.mark.parametrize(
    ("batch", "shape", "together"),
    [
        (6, (1, 2, 128, 128), 6),
        (12, (1, 1, 128, 128), 6),
        (11, (1, 2, 128, 128), None),  # no divisor whose keys would fit the cache
        (6, (6, 2, 128, 128), None),
        (6, (1, 2, 1, 128), None),
    ],
)
def test_sequences_that_share_a_large_bias_are_neighbours(batch, shape, together):
    from precisionpass.kernels.launch import Plan
    from tests.kernels.compiling import compiling_for

    with compiling_for("sm_90"):
        one = example(rows=128, keys=128, bias=shape)
        repeated = {name: getattr(one, name).repeat(batch, 1, 1, 1) for name in ("q", "k", "v")}
        plan = Plan(replace(one, **repeated))
    assert plan.numbers.together == together and plan.variant["together"] == (together is not None)


def test_a_mask_of_bits_has_tiles_of_its_own():
    """Without bounds, and beside nothing else that takes registers."""
    from precisionpass.kernels.launch import Plan
    from precisionpass.kernels.tuning import FORWARD, QUERY
    from tests.kernels.compiling import compiling_for

    def tiles(**settings):
        plan = Plan(example(rows=256, keys=4096, mask=(1, 1, 256, 4096), **settings))
        return plan.tile(FORWARD), plan.tile(QUERY)

    with compiling_for("sm_90"):
        alone, bounded, capped = tiles(), tiles(causal="bottom_right"), tiles(softcap=30.0)
    assert alone[0].key_block == 128 and alone[1].registers == 128
    assert bounded == capped and bounded[0].key_block == 64 and not bounded[1].registers
