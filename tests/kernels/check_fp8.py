"""Run under TRITON_INTERPRET=1: the FP8 forward of the kernels against the reference, on the CPU, in FP16.

The interpreter's casts to FP8 lose the carry of a rounding, so they are replaced by torch's.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy
import torch
import triton.runtime.interpreter as interpreter

from precisionpass.kernels import attention, tuning
from precisionpass.numerics.fp8 import largest
from precisionpass.ops.arguments import AttentionArguments
from precisionpass.reference import attention as reference
from tests.kernels.agreement import error
from tests.kernels.cases import CASES

EVERY_PRODUCT = (
    "qk=fp8_e4m3",
    "pv=fp8_e4m3",
    "qk=fp8_e5m2 pv=fp8_e5m2 scale=tensor",
    "pv=fp8_e4m3 scale=block",
    "qk=fp8_e4m3 pv=fp8_e4m3 scale=row",
    "qk=fp8_e4m3 pv=fp8_e4m3 scale=block",
    "qk=fp8_e4m3 pv=fp8_e4m3",
)
SHORT = (
    "plain", "causal, tiles and a tail", "grouped", "odd widths", "bias, rows of finfo.min", "mask, a dead row, nan",
    "sinks by row, dead rows", "dropout, grouped, bias", "softcap", "decode, output clip",
    "row_max_shift, negative, within a tolerance",
)  # fmt: skip
FORMATS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
WIDE = {"fp16": torch.float16, "fp32": torch.float32}
theirs = interpreter._convert_float


def convert(data, source, target, rounding):
    """`_convert_float` of the interpreter, with FP8 done by torch; the bits of an array of numbers or of codes."""
    if target.name in FORMATS:
        numbers = torch.from_numpy(numpy.ascontiguousarray(data)).float()
        limit = largest(FORMATS[target.name])
        return numbers.clamp(-limit, limit).to(FORMATS[target.name]).view(torch.uint8).numpy()
    if source.name in FORMATS:
        codes = torch.from_numpy(numpy.ascontiguousarray(data)).view(FORMATS[source.name])
        return codes.to(WIDE[target.name]).numpy()
    return theirs(data, source, target, rounding)


def fp8_cases(dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[str, AttentionArguments]]:
    """Every case that the kernels compute in FP8, its first key head a hundred times larger."""
    for name, case in CASES.items():
        arguments = case.build(dtype, device)
        arguments.k[:, :1] *= 100
        shift = arguments.row_max_shift and (2.0, 1.5, *arguments.row_max_shift[2:])
        arguments = replace(arguments, matmul=EVERY_PRODUCT[-1], row_max_shift=shift, probabilities="none")
        arguments = replace(arguments, implementation="triton")
        if attention.supports(arguments) is None:
            yield name, arguments


def differences(arguments: AttentionArguments) -> tuple[float, float, float]:
    """Of output, relative, and of log-sum-exp and largest logits, absolute over 10 + their size."""
    found, expected = attention.forward(arguments), reference.forward(arguments)
    return error(found[0], expected[0]), *(
        float(((one - other).nan_to_num(0.0, 0.0, 0.0).abs() / (other.abs().nan_to_num(0.0, 0.0, 0.0) + 10)).max())
        for one, other in zip(found[2:4], expected[2:4], strict=True)
    )


def main() -> int:
    """Print the differences of each case; the number of faults."""
    torch.set_num_threads(1)
    interpreter._convert_float = convert
    tuning.multiprocessors = lambda device: 16  # as on a small GPU: few rows are split over keys
    faults = 0
    for name, arguments in fp8_cases(torch.float16):
        if name not in SHORT:
            continue
        for matmul in EVERY_PRODUCT if name in ("plain", "causal, tiles and a tail") else EVERY_PRODUCT[-1:]:
            found = differences(replace(arguments, matmul=matmul))
            wrong = not (found[0] < 2e-3 and max(found[1:]) < 1e-4)
            faults += wrong
            print("FAULT" if wrong else "right", name, matmul, *(f"{value:.1e}" for value in found), flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main() > 0)
