"""Compile the kernels that an attention would launch, for a GPU that is not there, and read what each binary needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from precisionpass.kernels import attention, rows, tuning
from precisionpass.kernels.launch import options_of
from precisionpass.ops.arguments import AttentionArguments, Gradients, Saved

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: bytes of shared memory, registers and stack bytes a thread (None where unknown), PTX."""

    kernel: str
    shared_memory: int
    registers: int | None
    stack: int | None
    text: str = ""


class AbsentDevice:
    """Stands where Triton looks for a driver: it knows the target, and can launch nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(name: str, *, keep_text: bool = False) -> Iterator[list[Binary]]:
    """Inside, kernels are compiled for TARGETS[name] instead of launched, and the binaries collected."""
    found: list[Binary] = []
    config = triton.runtime.driver
    before, launch, multiprocessors = config._active, attention.launch, tuning.multiprocessors

    def compile_only(kernel, programs, tile, *arguments, **constants) -> None:
        kernel.device_caches.clear()  # they are kept by device number, whatever the target
        compiled = kernel.warmup(
            *arguments, **constants, grid=(programs,), **options_of(tile)
        )
        text = compiled.asm.get("ptx", "") if keep_text else ""
        found.append(Binary(kernel.__name__, compiled.metadata.shared, *_resources(compiled), text))

    config.set_active(AbsentDevice(TARGETS[name]))
    attention.launch = rows.launch = compile_only
    tuning.multiprocessors = lambda device: 132
    try:
        yield found
    finally:
        attention.launch = rows.launch = launch
        tuning.multiprocessors = multiprocessors
        config._active = before


def _resources(compiled) -> tuple[int | None, int | None]:
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def compile_attention(arguments: AttentionArguments, *, backward: bool = True, lse_gradient: bool = False) -> None:
    """Send an attention through the host code of forward and backward, inside `compiling_for`."""
    output, residual, lse, _, probabilities = attention.forward(arguments)
    if not backward:
        return
    needs = (True, True, True, arguments.bias is not None, arguments.sinks is not None)
    needs += tuple(tensor.is_floating_point() for tensor in arguments.score_inputs)
    gradient = torch.empty_like(output)
    saved = Saved(output, residual, lse)
    through_probabilities = None if arguments.probabilities == "none" else probabilities
    through_lse = lse if lse_gradient else None
    attention.backward(Gradients(gradient, through_lse, through_probabilities, needs), arguments, saved)


def example(
    *, width=64, value_width=None, dtype=torch.bfloat16, heads=2, key_heads=None, rows=256, keys=256, bias=None,
    mask=None, sinks=False, dropout=False, packed=False, **settings,
) -> AttentionArguments:  # fmt: skip
    """Arguments with uninitialised tensors of the layout a model hands over, [B, S, H, W] transposed."""
    key_heads = key_heads or heads
    q, k, v = (
        torch.zeros(1, length, count, size, dtype=dtype).transpose(1, 2)
        for length, count, size in (
            (rows, heads, width), (keys, key_heads, width), (keys, key_heads, value_width or width),
        )
    )
    return AttentionArguments(
        q, k, v,
        bias=None if bias is None else torch.zeros(bias, dtype=dtype),
        mask=None if mask is None else torch.ones(mask, dtype=torch.bool),
        sinks=torch.zeros(1, heads, 1, 1) if sinks else None,
        seed=torch.zeros(1, dtype=torch.int64) if dropout else None,
        cu_seqlens_q=torch.tensor([0, rows // 2, rows], dtype=torch.int32) if packed else None,
        cu_seqlens_k=torch.tensor([0, keys // 3, keys], dtype=torch.int32) if packed else None,
        dropout_p=0.1 if dropout else 0.0,
        **{"scale": width**-0.5, "save_residual": True} | settings,
    )  # fmt: skip
