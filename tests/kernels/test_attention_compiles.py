"""Every portable kernel compiles for GPUs that are not there, within their shared memory and with next to no spills."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY_LIMIT, TARGETS, compile_attention, compiling_for, example

SQUARE = (1, 2, 256, 256)
ATTENTIONS = {
    "causal, 64 wide": {"width": 64, "causal": "top_left"},
    "full, 128 wide": {"width": 128},
    "everything at once": {
        "width": 64, "bias": SQUARE, "mask": (1, 1, 1, 256), "dropout": True, "sinks": True, "key_heads": 1,
        "causal": "bottom_right", "window_left": 100, "softcap": 30.0, "delta": "recompute",
    },
    "a mask that heads share": {"width": 64, "mask": (1, 1, 256, 256)},
    "score, probabilities, clips": {
        "width": 64, "causal": "top_left", "score": "where(t1 and i - j < 9, s * t0, -inf) + abs(h - j)",
        "score_inputs": (torch.zeros(1, 2, 1, 256), torch.ones(1, 1, 1, 256, dtype=torch.bool)),
        "probabilities": "softmax", "output_clip": 1.0, "row_max_shift": (2.0, 8.0, 0.0),
    },
    "packed": {
        "width": 64, "causal": "bottom_right", "packed": True, "mask": (1, 1, 1, 256), "dropout": True, "key_heads": 1,
    },
    "odd widths and lengths": {"width": 20, "value_width": 37, "rows": 77, "keys": 99, "dtype": torch.float16},
}  # fmt: skip
MORE_FOR_HOPPER = {
    "causal, 128 wide": {"width": 128, "causal": "top_left"},
    "causal, 256 wide": {"width": 256, "causal": "top_left"},
    "latent, 192 and 128": {"width": 192, "value_width": 128, "causal": "top_left"},
    "decode": {"width": 128, "rows": 1, "keys": 4096, "key_heads": 1},
    "full mask": {"width": 128, "mask": SQUARE},
    "a mask that heads share, 128 wide": {"width": 128, "mask": (1, 1, 256, 256)},
    "such a mask, many keys": {"width": 64, "mask": (1, 1, 256, 4096), "keys": 4096},
    "such a mask, many keys, 128 wide": {"width": 128, "mask": (1, 1, 256, 4096), "keys": 4096},
    "such a mask and dropout": {"width": 128, "mask": (1, 1, 256, 256), "dropout": True},
    "float32": {"width": 64, "dtype": torch.float32, "causal": "top_left"},
}
MATRIX = [(target, name) for target in TARGETS for name in ATTENTIONS]
MATRIX += [("sm_90", name) for name in MORE_FOR_HOPPER]
STACK_LIMIT = 128
STACK_LIMITS = {
    "everything at once": 1280,  # no model asks for all of it: it must compile and be right
    "score, probabilities, clips": 640,  # of a score expression every operation is a tile in registers
    "packed": 640,  # addresses for every row, a mask by pointer, Philox
    "odd widths and lengths": 256,  # rows of 40 bytes: an address for nearly every element
    "causal, 256 wide": 512,  # spills and all, the fastest tile measured
}


@pytest.mark.parametrize(("target", "name"), MATRIX)
def test_it_compiles_within_the_limits(target, name):
    with compiling_for(target) as binaries:
        arguments = example(**(ATTENTIONS | MORE_FOR_HOPPER)[name], implementation="triton")
        compile_attention(arguments, lse_gradient=True)
    made = {binary.kernel for binary in binaries}
    assert {"attention_forward", "key_value_gradients", "query_gradients"} <= made
    limit = STACK_LIMITS.get(name, STACK_LIMIT)
    for binary in binaries:
        assert binary.shared_memory <= SHARED_MEMORY_LIMIT[target], binary
        assert binary.stack is None or binary.stack <= limit, binary


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_hopper_moves_tiles_by_descriptor_and_multiplies_by_warpgroup(causal):
    with compiling_for("sm_90", keep_text=True) as binaries:
        compile_attention(example(width=128, causal=causal, implementation="triton"), backward=False)
    (forward,) = binaries
    assert "cp.async.bulk.tensor" in forward.text and "wgmma.mma_async" in forward.text


def test_lengths_share_a_binary_where_the_tiles_fit():
    """Another length recompiles only when it begins or ceases to be a multiple of the tile."""
    from precisionpass.kernels.launch import Plan
    from precisionpass.kernels.tuning import FORWARD

    with compiling_for("sm_90"):
        variants = set()
        for length in (1024, 2048, 4096, 4096 + 8, 5000):
            plan = Plan(example(rows=length, keys=length, causal="top_left"))
            variants.add(plan.variant_for(plan.tile(FORWARD)))
    assert len(variants) == 2
