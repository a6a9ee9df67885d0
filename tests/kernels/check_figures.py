"""Run under TRITON_INTERPRET=1: what the kernels record against what the reference does, of the same saved tensors.

A number is the largest difference of a row of the totals in units of the row's own size and the format's rounding.
"""

import sys
from dataclasses import replace

import torch

from precisionpass.hooks.collector import Collector
from precisionpass.hooks.figures import MAXIMA, RECORDS, ROWS
from precisionpass.hooks.recorder import Recorder
from precisionpass.kernels import attention
from precisionpass.ops.arguments import Gradients, Saved
from precisionpass.reference import attention_backward as reference
from tests.kernels.agreement import ROUNDING
from tests.kernels.cases import CASES

NAMES = (
    "causal", "grouped", "odd widths", "window, two sides", "dropout", "recompute", "packed", "sinks by head",
    "lse gradient", "mask, a dead row",
)  # fmt: skip
BIAS = ("bias", "bias_square", "bias_size")


def recorded(compute, gradients, arguments, saved):
    """The totals, [len(ROWS), heads], after one backward."""
    recorder = Recorder()
    recorder.handle("site", tuple(RECORDS))
    collector = Collector(recorder.site("site"), arguments)
    dq, dk, dv, *_ = compute(gradients, arguments, saved, collector)
    collector.tensors(q=arguments.q, k=arguments.k, v=arguments.v, output=saved.output, grad_output=gradients.output)
    collector.tensors(grad_q=dq, grad_k=dk, grad_v=dv)
    collector.finish(gradients.output, saved.output)
    return recorder.site("site").together()


def differences(case, dtype, device="cpu", **settings):
    """By row that the kernels record: the largest difference, relative to what the format's rounding makes of it."""
    arguments = replace(case.build(dtype, device), **settings)
    upstream, lse_gradient, probability_gradient = case.upstream(arguments)
    output, residual, lse, _, _ = attention.forward(arguments)
    saved = Saved(output, residual, lse)
    needs = (True, True, True, False, False) + (False,) * len(arguments.score_inputs)
    gradients = Gradients(upstream, lse_gradient, probability_gradient, needs)
    ours = recorded(attention.backward, gradients, arguments, saved)
    theirs = recorded(reference.backward, gradients, arguments, saved)
    unit, found = ROUNDING[dtype], {}
    for name in (*BIAS, "sequences", "rows", *(name for name in MAXIMA if name.startswith("amax"))):
        one, two = ours[ROWS.index(name)], theirs[ROWS.index(name)]
        size = theirs[ROWS.index("bias_size")] if name == "bias" else two.abs()
        if name == "bias_square":
            one, two, size = one.sqrt(), two.sqrt(), theirs[ROWS.index("bias_size")]
        different = (one - two).abs().where(one != two, 0.0)
        found[name] = float((different / size.clamp(min=1e-30)).max()) / unit
    return found


def main() -> int:
    torch.set_num_threads(1)
    faults = 0
    for name in NAMES:
        for settings in ({}, {"delta": "output"}) if name in ("causal", "packed") else ({},):
            errors = differences(CASES[name], torch.float16, **settings)
            wrong = any(not value < 1 for value in errors.values())
            faults += wrong
            listed = " ".join(f"{key} {value:.2g}" for key, value in errors.items())
            print("FAULT" if wrong else "right", name, settings, listed, flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main() > 0)
