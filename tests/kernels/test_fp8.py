"""The FP8 forward of the kernels: its logic by the interpreter, its binaries for GPUs that are not there."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from precisionpass.kernels.attention import supports
from tests.kernels import compiling
from tests.kernels.compiling import compile_attention, compiling_for, example
from tests.kernels.interpreted import interpreted

BOTH = "qk=fp8_e4m3 pv=fp8_e4m3"


def test_it_agrees_with_the_reference():
    result = interpreted("check_fp8")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("right") == 23


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("sm_90", {"width": 128, "mask": (1, 1, 1, 256), "sinks": True, "dropout": True}),
        ("sm_89", {"width": 256, "causal": "top_left"}),
        ("sm_90", {"width": 20, "value_width": 37, "rows": 77, "keys": 99, "matmul": "pv=fp8_e5m2 scale=row"}),
        ("sm_100", {"width": 128, "rows": 1, "keys": 4096, "matmul": BOTH + " scale=block"}),
    ],
)
def test_it_compiles_within_the_limits(target, settings, monkeypatch):
    monkeypatch.setitem(compiling.TARGETS, "sm_89", GPUTarget("cuda", 89, 32))
    with compiling_for(target) as binaries:
        compile_attention(example(**{"matmul": BOTH} | settings), backward=False)
    assert [binary.kernel for binary in binaries].count("attention_forward") == 1
    for binary in binaries:
        assert binary.shared_memory <= (compiling.SHARED_MEMORY_LIMIT | {"sm_89": 101376})[target]
        assert binary.stack is None or binary.stack <= 128, binary


def test_on_hopper_p_stays_in_the_registers_of_its_thread():
    """Both products are warpgroup products of FP8, and between them P crosses no lane and no shared memory."""
    with compiling_for("sm_90", keep_text=True) as binaries:
        compile_attention(example(width=128, rows=4096, keys=4096, matmul=BOTH), backward=False)
    text = binaries[-1].text
    products = [match.start() for match in re.finditer(r"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", text)]
    assert len(products) >= 8
    casts = [match.start() for match in re.finditer(r"cvt.rn.satfinite.e4m3x2.f32", text)]
    between = text[min(place for place in casts if place > products[0]) : products[-1]]
    stored = re.findall(r"st\.shared\S* \[[^]]*\], \{([^}]*)\}", between)
    assert all(len(set(re.split(r"[\s,]+", values.strip()))) == 1 for values in stored), "the ones, and nothing else"
    assert between.count("st.shared") == len(stored)
    assert "shfl.sync.idx" not in between and "ldmatrix" not in between


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"score": " + ".join(f"exp(s / {number}) * tanh(s)" for number in range(1, 90))},
            "the kernels take score expressions of at most 400 operations, their slopes included",
        ),
        ({"probabilities": "softmax"}, "the kernels do not return probabilities beside FP8 products"),
        (
            {name: torch.tensor([0, 100, 256], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")},
            "the kernels have no FP8 products over packed sequences",
        ),
    ],
)
def test_what_has_no_kernel_is_named(change, reason):
    assert supports(replace(example(matmul=BOTH, implementation="triton"), **change)) == reason


def test_they_are_for_who_asks():
    assert supports(example(matmul=BOTH, implementation="triton")) is None
    assert supports(example(matmul=BOTH)).startswith("the FP8 kernels have not run on a GPU yet")
