"""The kernels' int8 residual against the specification in numerics/formats.py; under TRITON_INTERPRET=1 on a CPU."""

import sys

import torch
import triton
import triton.language as tl

from precisionpass.kernels import residual as residual_code
from precisionpass.numerics.formats import decode_residual

ROWS, COLUMNS = 256, 64


@triton.jit
def _round_trip(precise, rounded, steps, restored, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS).to(tl.int64)[:, None], tl.arange(0, COLUMNS)[None, :]
    place = row * COLUMNS + column
    kept = tl.load(rounded + place)
    code = residual_code.encode(tl.load(precise + place), kept, row, column)
    tl.store(steps + place, code)
    tl.store(restored + place, residual_code.decode(kept, code))


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """FP32 [ROWS, COLUMNS] each."""
    same = torch.ones(ROWS, COLUMNS)
    source = torch.Generator().manual_seed(3)
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    return {
        "zeros": 0 * same, "negative zeros": -0.0 * same, "smallest": 2.0**-24 * same, "alike": 1.2345678 * same,
        "alike, negative": -3.0001 * same, "ties": (1 + unit / 2) * same, "exact": -1.5 * same,
        "random": torch.randn(ROWS, COLUMNS, generator=source), "infinite": torch.inf * same, "nan": torch.nan * same,
    }  # fmt: skip


def faults(device: str) -> list[str]:
    """What is wrong, in words; empty where the kernel holds what the specification says."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        unit = torch.finfo(dtype).eps
        for name, precise in inputs(dtype).items():
            precise = precise.to(device)
            rounded = precise.to(dtype)
            steps, restored = torch.empty_like(precise, dtype=torch.int8), torch.empty_like(precise)
            _round_trip[(1,)](precise, rounded, steps, restored, ROWS, COLUMNS)
            if not precise.isfinite().all():
                wrong = not torch.equal(restored.nan_to_num(7.0), precise.nan_to_num(7.0))
            else:
                size = unit * precise.double().abs().clamp(min=2.0**-14)
                off = (restored.double() - precise.double()) / size
                mean = 5 * 0.5 / 254 / ROWS**0.5 + 2e-5
                wrong = not (off.abs().max() <= 1.01 / 254 and (off.mean().abs() <= mean or name == "random"))
            wrong |= not torch.equal(restored.nan_to_num(7.0), decode_residual(rounded, steps).nan_to_num(7.0))
            found += [f"{name} in {dtype}"] * wrong
    return found


if __name__ == "__main__":
    sys.exit("; ".join(faults("cpu")) or 0)
