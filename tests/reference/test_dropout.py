"""The dropout stream: Triton's own tl.rand gives the same numbers, and they are uniform."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from precisionpass.reference.dropout import keep_mask, uniform

OFFSETS = [0, 1, 2, 77, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5, 2**40 + 123]
SEEDS = [0, 1, 1234, 2**31, 2**32 + 7, 2**62 + 3]

THROUGH_TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def draw(seed_pointer, offset_pointer, out_pointer, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_pointer + place, tl.rand(tl.load(seed_pointer), tl.load(offset_pointer + place)))
offsets = torch.tensor({offsets}, dtype=torch.int64)
for seed in {seeds}:
    out = torch.empty(16)
    draw[(1,)](torch.tensor([seed]), offsets, out, 16)
    print(*[value.hex() for value in out.tolist()])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_stream_is_tritons_bit_for_bit(tmp_path):
    offsets = OFFSETS + [9] * (16 - len(OFFSETS))
    file = tmp_path / "draw.py"
    file.write_text(THROUGH_TRITON.format(offsets=offsets, seeds=SEEDS))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, check=True)
    for seed, line in zip(SEEDS, ran.stdout.splitlines(), strict=True):
        ours = [value.hex() for value in uniform(seed, torch.tensor(offsets)).tolist()]
        assert ours == line.split(), seed


def test_numbers_are_uniform_and_differ_by_seed():
    numbers = uniform(3, torch.arange(200_000))
    assert 0.0 <= float(numbers.min()) and float(numbers.max()) < 1.0
    counts = torch.histc(numbers, 20, 0.0, 1.0)
    # Chi squared of 19 degrees of freedom: 43.8 is the 99.9th percentile.
    assert float((counts - 10_000).square().sum() / 10_000) < 43.8
    assert not torch.equal(numbers, uniform(4, torch.arange(200_000)))


def test_the_mask_is_a_function_of_seed_and_position():
    offset = torch.arange(2 * 3 * 500 * 60).view(2, 3, 500, 60)
    whole = keep_mask(torch.tensor([5]), 0.25, offset)
    assert torch.equal(whole[1:, 1:, 100:, 7:], keep_mask(torch.tensor([5]), 0.25, offset[1:, 1:, 100:, 7:]))
    # 180 000 draws: six standard deviations are 0.006.
    assert abs(float(whole.float().mean()) - 0.75) < 0.006
    assert torch.equal(whole, uniform(5, offset) >= 0.25)
