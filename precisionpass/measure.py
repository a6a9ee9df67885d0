"""A site alone, as it was and as it is now, against the same arithmetic in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_TO_A_FORMAT = ("float", "half", "bfloat16")
_DROPOUTS = ("dropout", "dropout_", "native_dropout")
_DROPOUT_AT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 11}  # where the rate stands


@dataclass(frozen=True)
class Row:
    """Errors of one tensor: ||x - exact|| / ||exact||, and mean(x - exact) / mean |exact|, which adds up over steps."""

    name: str
    old_error: float
    new_error: float
    old_bias: float
    new_bias: float


def compare(old: Callable, new: Callable, inputs: Mapping[str, object], seed: int = 0) -> tuple[Row, ...]:
    """The first output of `old` and `new`, and the gradient of every floating input, against `old` in float64.

    inputs: argument name -> a tensor or a number, the same for both. Dropout is left out: it would only add noise.
    Gradients are those of sum(output * u) for a random u. Inputs and the global random state stay as they are.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with _Exact():
            exact = _run(old, {name: _wide(held) for name, held in inputs.items()}, None)
        upstream = torch.randn(exact["output"].shape).bfloat16().to(exact["output"])  # the same number in every format
        with _Exact():
            exact = _run(old, {name: _wide(held) for name, held in inputs.items()}, upstream)
        with _WithoutDropout():
            was, now = (_run(function, inputs, upstream) for function in (old, new))
    return tuple(
        Row(name, *(_error(side[name], true) for side in (was, now)), *(_bias(side[name], true) for side in (was, now)))
        for name, true in exact.items()
        if name in was and name in now and bool(true.any())
    )


def show_comparison(old: Callable, new: Callable, inputs: Mapping[str, object]) -> None:
    """Print what `compare` finds."""
    print(f"{'against float64':<32}{'error, old':>12}{'new':>12}{'bias, old':>14}{'new':>12}")
    for row in compare(old, new, inputs):
        errors, biases = (row.old_error, row.new_error), (row.old_bias, row.new_bias)
        print(f"{row.name:<32}{errors[0]:>12.2e}{errors[1]:>12.2e}{biases[0]:>+14.2e}{biases[1]:>+12.2e}")


def show(results: object) -> None:
    """Print the format and shape of each tensor among the results of a graph."""
    for position, result in enumerate(results if isinstance(results, tuple | list) else (results,)):
        print(position, f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else result)


_SOURCE = torch.Generator().manual_seed(0)


def start_over() -> None:
    """Let made-up values begin again with the first, as in a fresh process."""
    _SOURCE.manual_seed(0)


def made_up(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A made-up tensor, the same on every device: normal values; positions where it is a row of whole numbers, else
    ones; a mask that lets nine of ten through and the first of every row. On the meta device it has no values.
    """
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=_SOURCE).to(device, dtype)
    if dtype == torch.bool:
        allowed = torch.rand(shape, generator=_SOURCE) < 0.9
        allowed[..., :1] = True
        return allowed.to(device)
    whole = torch.arange(shape[0]) if len(shape) == 1 else torch.ones(shape)
    return whole.to(device, dtype)


def _run(function: Callable, inputs: Mapping[str, object], upstream: Tensor | None) -> dict[str, Tensor]:
    """The first output as "output", and with an upstream gradient those of the inputs."""
    own = {name: _own(held) for name, held in inputs.items()}
    result = function(**own)
    output = next(r for r in (result if isinstance(result, tuple | list) else (result,)) if isinstance(r, Tensor))
    found = {"output": output.detach()}
    wanted = {n: x for n, x in own.items() if isinstance(x, Tensor) and x.requires_grad}
    if upstream is not None and wanted and output.requires_grad:
        gradients = torch.autograd.grad(output, tuple(wanted.values()), upstream.to(output.dtype), allow_unused=True)
        found |= {f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True) if g is not None}
    return found


def _own(held: object) -> object:
    if not isinstance(held, Tensor):
        return held
    return held.detach().clone().requires_grad_(held.is_floating_point())


def _wide(held: object) -> object:
    return held.double() if isinstance(held, Tensor) and held.is_floating_point() else held


def _error(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).norm() / exact.norm())


def _bias(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).mean() / exact.abs().mean())


class _WithoutDropout(TorchFunctionMode):
    """Calls as they are, but with nothing dropped."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "").partition(".")[0]
        if name in _DROPOUTS:
            return args[0]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        place = _DROPOUT_AT.get(name, len(args))
        args = (*args[:place], *((0.0,) if len(args) > place else ()), *args[place + 1 :])
        return self.called(func, name, args, kwargs)

    def called(self, func, name, args, kwargs):
        return func(*args, **kwargs)


class _Exact(_WithoutDropout):
    """Every format that a call names or gives is float64."""

    def called(self, func, name, args, kwargs):
        if name in _TO_A_FORMAT:
            return args[0].double()
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _LOWER else a for a in args)
        kwargs = {n: torch.float64 if isinstance(a, torch.dtype) and a in _LOWER else a for n, a in kwargs.items()}
        result = func(*args, **kwargs)
        return type(result)(map(_wide, result)) if type(result) in (tuple, list) else _wide(result)
