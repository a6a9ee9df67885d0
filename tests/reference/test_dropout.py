"""The dropout stream: Triton's own tl.randint4x gives the same words, and they are uniform."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from precisionpass.reference.dropout import keep_mask, philox

OFFSETS = [0, 1, 2, 77, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5, 2**40 + 123]
SEEDS = [0, 1, 1234, 2**31, 2**32 + 7, 2**62 + 3]

THROUGH_TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def draw(seed_pointer, offset_pointer, out_pointer, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    words = tl.randint4x(tl.load(seed_pointer), tl.load(offset_pointer + place), 7)
    for index in tl.static_range(4):
        tl.store(out_pointer + 4 * place + index, words[index].to(tl.int64) & 0xFFFFFFFF)
offsets = torch.tensor({offsets}, dtype=torch.int64)
for seed in {seeds}:
    out = torch.empty(16, 4, dtype=torch.int64)
    draw[(1,)](torch.tensor([seed]), offsets, out, 16)
    print(*out.view(-1).tolist())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_stream_is_tritons_bit_for_bit(tmp_path):
    offsets = OFFSETS + [9] * (16 - len(OFFSETS))
    file = tmp_path / "draw.py"
    file.write_text(THROUGH_TRITON.format(offsets=offsets, seeds=SEEDS))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, check=True)
    for seed, line in zip(SEEDS, ran.stdout.splitlines(), strict=True):
        assert philox(seed, torch.tensor(offsets)).view(-1).tolist() == [int(word) for word in line.split()], seed


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("word", [0, 1, 2, 3])
def test_every_half_of_every_word_is_uniform_and_differs_by_seed(word, half):
    numbers = philox(3, torch.arange(200_000))[:, word] >> 16 * half & 0xFFFF
    counts = torch.histc(numbers.float(), 16, 0.0, 65536.0)
    # Chi squared of 15 degrees of freedom: 43 is the 99.98th percentile.
    assert float((counts - 12_500).square().sum() / 12_500) < 43
    assert not torch.equal(numbers, philox(4, torch.arange(200_000))[:, word] >> 16 * half & 0xFFFF)


def test_the_mask_is_a_function_of_seed_and_position():
    seed, row = torch.tensor([5]), torch.arange(2 * 3 * 500).view(2, 3, 500)
    whole = keep_mask(seed, 0.25, row, slice(0, 61), 61)
    assert torch.equal(whole[1:, 1:, 100:, 7:35], keep_mask(seed, 0.25, row[1:, 1:, 100:], slice(7, 35), 61))
    # 183 000 draws: six standard deviations are 0.006.
    assert abs(float(whole.float().mean()) - 0.75) < 0.006
    for place in ((0, 0, 0, 0), (1, 2, 499, 60), (0, 1, 77, 13)):
        *batch, key = place
        call = int(row[tuple(batch)]) * 8 + key // 8
        word = int(philox(5, torch.tensor([call]))[0, key % 8 // 2])
        assert bool(whole[place]) == (word >> 16 * (key % 2) & 0xFFFF >= 0.25 * 2**16)


def test_neighbours_are_kept_independently():
    """Keys, rows and halves of a word side by side: a pair is kept together as often as chance has it."""
    kept = keep_mask(torch.tensor([11]), 0.5, torch.arange(4000), slice(0, 64), 64).float()
    for apart in range(1, 9):
        together = (kept[:, apart:] * kept[:, :-apart]).mean()
        assert abs(float(together) - 0.25) < 0.005, apart  # 224 000 pairs or more: 0.005 is five standard deviations
    assert abs(float((kept[1:] * kept[:-1]).mean()) - 0.25) < 0.005


def test_what_is_dropped_and_what_is_kept_balance():
    """The factor of what is kept belongs to the share in steps of 2^-16, not to the probability asked for."""
    from precisionpass.ops.arguments import AttentionArguments

    tensor = torch.zeros(1, 1, 1, 8)
    for probability in (0.1, 1e-6, 0.3, 0.999999, 1.0):
        arguments = AttentionArguments(tensor, tensor, tensor, dropout_p=probability)
        assert abs(arguments.dropped_share - probability) <= 2.0**-17
        kept = 1.0 - round(arguments.dropped_share * 2**16) / 2**16
        assert arguments.keep_scale * kept == (0.0 if kept == 0 else pytest.approx(1.0, rel=1e-15))
