"""The Hopper kernels compile for a GPU that is not there, as fast code: next to no spills, no serialised products."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import triton

from precisionpass.kernels import attention, hopper
from precisionpass.kernels.launch import Plan
from tests.kernels.compiling import SHARED_MEMORY_LIMIT, compile_attention, compiling_for, example

FORWARD, SEPARATE = "attention_forward_hopper", ("query_gradients_hopper", "key_value_gradients_hopper")
FUSED = ("key_value_gradients_hopper",)
ATTENTIONS = {
    "full, 128 wide": ({"width": 128}, SEPARATE),
    "causal, 128 wide": ({"width": 128, "causal": "top_left"}, None),
    "full, 64 wide, fused": ({"width": 64, "deterministic": False}, FUSED),
    "causal, 64 wide, inference": ({"width": 64, "causal": "top_left", "save_residual": False}, None),
    "window, bottom_right, any lengths, grouped": (
        {"width": 64, "causal": "bottom_right", "window_left": 90, "rows": 200, "keys": 333, "key_heads": 1}, None
    ),
}  # fmt: skip
STACK_LIMIT = 512  # addresses and counters of a tile, kept outside of the loop over keys
SERIALISED = ("C7510", "C7511", "C7512", "C7513", "C7514")


def assembled(text: str, folder: Path) -> str:
    """What the assembler says about a kernel's PTX."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    (folder / "kernel.ptx").write_text(text)
    command = [tool, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("name", ATTENTIONS)
def test_they_compile_to_fast_code(name, tmp_path):
    settings, backward = ATTENTIONS[name]
    with compiling_for("sm_90", keep_text=True) as binaries:
        arguments = example(**settings, implementation="hopper")
        assert attention.chosen(arguments) == ("hopper", None)
        compile_attention(arguments, backward=backward is not None)
    made = {binary.kernel: binary for binary in binaries if binary.kernel != "prepare_rows"}
    assert set(made) == {FORWARD, *(backward or ())}
    for binary in made.values():
        assert binary.shared_memory <= SHARED_MEMORY_LIMIT["sm_90"] and binary.stack <= STACK_LIMIT, binary
        assert "wgmma.mma_async" in binary.text and "setmaxnreg.inc" in binary.text
        said = assembled(binary.text, tmp_path)
        assert f"Used {binary.registers} registers" in said and not any(code in said for code in SERIALISED), said


def test_the_loop_over_keys_holds_no_comparison_and_no_second_wait(tmp_path):
    """The softmax stands between the wait for the scores and the wait for P V: else nothing runs beside it."""
    with compiling_for("sm_90", keep_text=True) as binaries:
        compile_attention(example(width=128, implementation="hopper"), backward=False)
    loop = max(re.split(r"\$L__BB0_\d+:", binaries[0].text), key=lambda block: block.count("wgmma.mma_async"))
    scores, softmax, products = (loop.index(mark) for mark in ("wait_group.sync.aligned 1", "ex2", "aligned 0"))
    assert scores < softmax < products
    assert "setp.le" not in loop and "setp.gt.s32" not in loop


REFUSED = {
    "no Hopper": ({}, "sm_80", "the GPU is no Hopper"),
    "FP32": ({"dtype": torch.float32}, "sm_90", "compute in bfloat16 and float16"),
    "256 wide": ({"width": 256}, "sm_90", "head dimensions of 33 to 128"),
    "20 wide": ({"width": 20}, "sm_90", "head dimensions of 33 to 128"),
    "strides": ({"width": 100, "value_width": 100}, "sm_90", "strides no multiples of 16 bytes"),
    "decode": ({"rows": 1}, "sm_90", "more than 64 rows"),
    "mask": ({"mask": (1, 1, 256, 256)}, "sm_90", "have not a mask"),
    "bias": ({"bias": (1, 2, 256, 256)}, "sm_90", "have not a bias"),
    "sinks": ({"sinks": True}, "sm_90", "have not sinks"),
    "dropout": ({"dropout": True}, "sm_90", "have not dropout"),
    "packed": ({"packed": True}, "sm_90", "strides"),
    "softcap": ({"softcap": 3.0}, "sm_90", "have not softcap"),
    "logit clip": ({"logit_clip": "hard", "logit_clip_max": 1.0}, "sm_90", "have not logit clipping"),
    "FP8": ({"matmul": "qk=fp8_e4m3"}, "sm_90", "have not FP8 products"),
    "output clip": ({"output_clip": 1.0}, "sm_90", "have not output clipping"),
    "shift": ({"row_max_shift": (2.0, 8.0, 0.0)}, "sm_90", "have not row_max_shift"),
    "score": ({"score": "s * 2"}, "sm_90", "have not a score expression"),
    "float32 normaliser": ({"normaliser": "float32"}, "sm_90", "have not normaliser: float32"),
    "negative scale": ({"scale": -1.0}, "sm_90", "have not a scale that is not positive"),
    "not asked for": ({"implementation": "auto"}, "sm_90", 'where implementation="hopper" asks for them'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_portable_kernels_do_and_why(name):
    settings, target, reason = REFUSED[name]
    with compiling_for(target):
        chosen, said = attention.chosen(example(**{"implementation": "hopper"} | settings))
    assert chosen == "triton" and reason in said, said


BACKWARD = {
    "as the forward": ({}, None),
    "in one pass": ({"deterministic": False}, None),
    "not asked for": ({"implementation": "auto"}, 'where implementation="hopper" asks for them'),
    "other widths": ({"value_width": 128}, "values as wide as keys"),
    "dead rows": ({"dead_rows": "nan", "causal": "bottom_right", "keys": 255}, "rows without a key 0"),
    "returned probabilities": ({"probabilities": "softmax"}, "no gradient of the probabilities"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_the_backward_is_chosen_by_itself(name):
    settings, reason = BACKWARD[name]
    with compiling_for("sm_90"):
        said = hopper.backward_refusal(Plan(example(**{"implementation": "hopper"} | settings)))
    assert said is None if reason is None else reason in said


def test_the_environment_switches_them_off(monkeypatch):
    with compiling_for("sm_90"):
        assert attention.chosen(example(implementation="hopper")) == ("hopper", None)
        monkeypatch.setenv("PRECISIONPASS_HOPPER", "0")
        said = ("triton", "PRECISIONPASS_HOPPER switches the Hopper kernels off")
        assert attention.chosen(example(implementation="hopper")) == said
