"""Run under TRITON_INTERPRET=1, or on a GPU with `cuda`: norms and softmaxes of the kernels against float64."""

import sys

import torch

from precisionpass.kernels import rows, tuning
from precisionpass.reference import layer_norm, rms_norm

# shape, dims, weight, bias, mean before rounding (the deviation is 1; 16 bits round some of it away)
CASES = {
    "narrow": ((37, 20), 1, True, True, 0.0),
    "768": ((33, 768), 1, True, True, 3.0),
    "mean 100 times the deviation": ((9, 300), 1, True, True, 100.0),
    "mean 1000 times the deviation": ((9, 512), 1, True, True, 1000.0),
    "mean 10000 times the deviation": ((9, 512), 1, False, False, 10000.0),
    "no parameters": ((5, 100), 1, False, False, 0.0),
    "two dimensions": ((4, 3, 6, 50), 2, True, True, 1.0),
    "two programs a row": ((3, 12000), 1, True, True, 1.0),
    "wider than a tile": ((3, 17000), 1, True, True, 2.0),
    "one column": ((6, 1), 1, True, True, 0.0),
    "no row": ((0, 64), 1, True, True, 0.0),
    "one row": ((1, 4096), 1, True, False, 0.0),
}
SUMS = ("narrow", "768", "two dimensions", "two programs a row", "wider than a tile", "no row")
ODD = torch.tensor([float("inf"), float("-inf"), float("nan")])


def relative(found, truth, scale):
    """The largest error over `scale`; infinite where NaN or infinity stand in other places."""
    found = found.double()
    if not torch.equal(found.isnan(), truth.isnan()) or found.shape != truth.shape:
        return float("inf")
    finite = truth.isfinite()
    if not torch.equal(found[~finite & ~truth.isnan()], truth[~finite & ~truth.isnan()]):
        return float("inf")
    return float(((found - truth)[finite].abs() / scale).max()) if bool(finite.any()) else 0.0


def check(name: str, dtype: torch.dtype, device: str, center: bool, residual: bool = False) -> float:
    """The largest error of y, dx, dweight and dbias, in what each may be off by (NUMERICS 7).

    residual: of the norm of a sum, whose own gradient is added; infinite where the sum is not x's and the residual's.
    """
    shape, dims, has_weight, has_bias, offset = CASES[name]
    draw = torch.Generator().manual_seed(len(name))
    x = (torch.randn(shape, generator=draw) + offset).to(device, dtype)
    if name == "768":
        x[3], x[4], x[5, :3], x[6] = 0.0, 2.5, ODD.to(x), 1e4
    if name == "wider than a tile":
        x[1, :16384] = 40.0  # a first tile that says nothing of the rest
    gradient = torch.randn(shape, generator=draw).to(device, dtype)
    inner = shape[len(shape) - dims :]
    weight = torch.randn(inner, generator=draw).to(device, dtype) if has_weight else None
    bias = torch.randn(inner, generator=draw).to(device, dtype) if has_bias else None
    shift = 0.0 if center else 1.0
    needs = (True, has_weight, has_bias)
    further = None
    if residual:
        further, addend = gradient.flip(-1), x.flip(-1) / 2
        settings = (dims, weight, bias, 1e-5, shift, None)
        total, y, mean, rstd = rows.add_norm_forward(x, addend, *settings, center=center)
        if not torch.equal(total.nan_to_num(7.0), (x + addend).nan_to_num(7.0)):
            return float("inf")
        x = total
    else:
        y, mean, rstd = rows.norm_forward(x, dims, weight, bias, 1e-5, shift, None, center=center)
    of = (mean if center else None, rstd, shift, needs, further)
    found = (y, *rows.norm_backward(gradient, x, dims, weight, bias, *of))
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    if center:
        truth, mean, rstd = layer_norm.forward(wide[0], dims, *wide[1:], 1e-5)
        exact = layer_norm.backward(gradient.double(), wide[0], dims, *wide[1:], mean, rstd, needs, further)
    else:
        truth, rstd = rms_norm.forward(wide[0], dims, *wide[1:], 1e-5, 1.0)
        exact = rms_norm.backward(gradient.double(), wide[0], dims, *wide[1:], rstd, 1.0, needs, further)
    # One rounding of the result, and FP32's share of mean over deviation.
    unit = torch.finfo(dtype).eps + 1e-6 * (1 + offset)
    errors = []
    for got, known in zip(found, (truth, *exact), strict=True):
        if got.numel() or known.numel():
            finite = known[known.isfinite()]
            errors.append(relative(got, known, unit * max(float(finite.abs().max()) if finite.numel() else 1.0, 1.0)))
    return max(errors, default=0.0)


SOFTMAXES = {
    "narrow": ((37, 20), -1, 1.0),
    "wider than a tile": ((2, 20000), -1, 3.0),
    "over the first": ((70, 40), 0, 1.0),
    "over the middle": ((3, 600, 5), 1, 2.0),
    "one column": ((6, 1), 1, 1.0),
    "large": ((5, 300), -1, 5e3),
    "a million columns": ((1, 2**20 + 3), -1, 2.0),
    "no row": ((0, 7), -1, 1.0),
}


def check_softmax(name: str, dtype: torch.dtype, device: str, log: bool) -> float:
    """The largest error of y and dx in roundings of y's format and 2^-21."""
    shape, dim, size = SOFTMAXES[name]
    draw = torch.Generator().manual_seed(len(name))
    x = (size * torch.randn(shape, generator=draw)).to(device, dtype)
    if name == "narrow":
        x[1], x[2, :4], x[3, 0], x[4, 5] = float("-inf"), float("-inf"), float("inf"), float("nan")
    gradient = torch.randn(shape, generator=draw).to(device, dtype)
    function = torch.log_softmax if log else torch.softmax
    leaf = x.double().requires_grad_()
    truth = function(leaf, dim)
    (exact,) = torch.autograd.grad(truth, leaf, gradient.double())
    found = rows.softmax_forward(x, dim, None, log=log), rows.softmax_backward(gradient, x, dim, log=log)
    errors = [0.0]
    for got, known in zip(found, (truth.detach(), exact), strict=True):
        if known.numel():
            finite = known[known.isfinite()]
            unit = (torch.finfo(dtype).eps / 2 + 2.0**-21) * max(float(finite.abs().max()), 2.0**-14)
            errors.append(relative(got, known, unit))
    return max(errors)


def main(device: str) -> int:
    """Print the error of each case in its unit; the number of those above 1."""
    torch.set_num_threads(1)
    if device == "cpu":
        tuning.multiprocessors = lambda asked: 2
    dtypes = (torch.float16, torch.float32) if device == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    faults = 0
    for name in CASES:
        for dtype in dtypes:
            for center in (True, False):
                for residual in (False, True) if name in SUMS else (False,):
                    error = check(name, dtype, device, center, residual)
                    faults += not error < 1
                    kind = f"{'sum and ' * residual}{'layer_norm' if center else 'rms_norm'}"
                    print("right" if error < 1 else "FAULT", name, kind, dtype, f"{error:.2f}", flush=True)
    for name in SOFTMAXES:
        for dtype in dtypes:
            for log in (False, True):
                error = check_softmax(name, dtype, device, log)
                faults += not error < 1.5
                kind = "log_softmax" if log else "softmax"
                print("right" if error < 1.5 else "FAULT", name, kind, dtype, f"{error:.2f}", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["cpu"]) > 0)
