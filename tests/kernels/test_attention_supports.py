"""What the kernels refuse, and how they say it: the words reach a user through the review."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from precisionpass.kernels.attention import supports
from tests.kernels.compiling import example


def test_an_ordinary_attention_is_supported():
    assert supports(example()) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"score": "s + t0"}, "the kernels have no general score expressions yet"),
        ({"probabilities": "softmax"}, "the kernels do not return probabilities"),
        ({"row_max_shift": (2.0, 8.0, 0.0)}, "the kernels have no row_max_shift"),
        ({"output_clip": 1.0}, "the kernels have no output_clip"),
    ],
)
def test_a_setting_without_a_kernel_is_named(change, reason):
    assert supports(replace(example(), **change)) == reason


def test_float64_and_wide_heads_are_refused_in_words():
    assert supports(example(dtype=torch.float64)) == (
        "the kernels compute in bfloat16, float16 and float32, not float64"
    )
    assert supports(example(width=320)) == "the kernels take head dimensions up to 256, not 320"
