"""The error budgets that every implementation is held to, and where each comes from (NUMERICS 4 and 7)."""

from __future__ import annotations

from precisionpass.numerics.bias import Measured

RHO_SHARP = 8e-6
"""rho on G1-G5: the default measures at most 1e-6, arithmetics that make training fail from 2.4e-5 on."""

RHO_WIDE = 3e-5
"""rho on G6-G8, where scores of 50-100 carry FP32's own rounding into P: the default 9e-6, failing ones 3e-4."""

BIAS = 4e-6
"""b everywhere: the default at most 1.2e-6, failing arithmetics from 3e-5 on."""

ROW_SUM_P = 3e-5
"""max |rowsum P - 1| with an lse of the FP32 sum."""

OUTPUT = 2.0
"""max |O - O64| / (P|V|) in units of 2^-8: half an ulp of O at worst, and the roundings of P."""

LSE = 4e-7
"""Error of the lse over |m| + 10: a few FP32 roundings of a number of that size."""

DRIFT = 1e-4
"""Relative drift of W_Q from FP64 after 160 steps on the twin sink: the default 5e-6, FA2-style arithmetic .0125."""

NORM = 1e-6
"""Error of y and dx of a norm in FP32, relative to 1 + mean / std of a row."""


def broken(measured: Measured, *, sharp: bool) -> dict[str, tuple[float, float]]:
    """The figures over their budget, as {name: (figure, limit)}; ``sharp`` for G1-G5 and the controls."""
    limits = {
        "rho": RHO_SHARP if sharp else RHO_WIDE,
        "bias": BIAS,
        "row_sum_p": ROW_SUM_P,
        "output": OUTPUT,
        "lse": LSE,
        "nonfinite": 0,
        "wrong_zeros": 0,
        "dead_gradient": 0.0,
    }
    figures = {name: (getattr(measured, name), limit) for name, limit in limits.items()}
    return {name: pair for name, pair in figures.items() if not pair[0] <= pair[1]}
