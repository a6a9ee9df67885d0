"""One step of a model or function, eager and through precisionpass, compared: outputs and every gradient."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import precisionpass


@dataclass(frozen=True)
class Step:
    """What one forward (and backward) gave: the output tensors, and the gradient of every parameter and input."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def step(call: Callable, args=(), kwargs=None, training: bool = True, seed: int = 0, readout: int = 7) -> Step:
    """Run `call` on copies of the arguments. The loss is a fixed random sum of every floating output."""
    args, kwargs = tree_map(_fresh, (tuple(args), dict(kwargs or {})))
    torch.manual_seed(seed)
    with torch.set_grad_enabled(training):
        outputs = [leaf for leaf in tree_leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    if not training:
        return Step([output.detach().clone() for output in outputs])
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    named = {f"input {position}": leaf for position, leaf in enumerate(inputs)}
    if isinstance(call, torch.nn.Module):
        named |= {name: p for name, p in call.named_parameters() if p.requires_grad}
        call.zero_grad()
    weights = torch.Generator().manual_seed(readout)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.requires_grad:
            loss = loss + (output.double() * torch.randn(output.shape, generator=weights, dtype=torch.float64)).sum()
    loss.backward()
    found = {name: leaf.grad.detach().clone() for name, leaf in named.items() if leaf.grad is not None}
    return Step([output.detach().clone() for output in outputs], found)


def against_eager(
    call: Callable,
    args=(),
    kwargs=None,
    *,
    rules="stable-bf16",
    backend="aot_eager",
    training=True,
    tolerance: float = 1e-5,
    rewritten: dict[str, int] | None = None,
    seed: int = 0,
    **options,
):
    """Compile, run, compare with eager. `rewritten`: how many sites of each kind the report must have rewritten."""
    torch._dynamo.reset()
    plain = copy.deepcopy(call) if isinstance(call, torch.nn.Module) else call
    expected = step(plain, args, kwargs, training, seed)
    exact = in_float64(plain, args, kwargs, training, seed) if tolerance < 1e-3 else None
    compiled = precisionpass.compile(call, rules=rules, backend=backend, **options)
    found = step(compiled, args, kwargs, training, seed)
    report = precisionpass.report(compiled)
    if rewritten is not None:
        assert counts(report) == rewritten, report.text()
    same(found, expected, tolerance, exact)
    return report


def same(found: Step, expected: Step, tolerance: float, exact: Step | None = None) -> None:
    """Norm-wise per tensor. A gradient that a float64 run shows to be zero in exact arithmetic need only be small."""
    assert len(found.outputs) == len(expected.outputs)
    for position, (ours, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        _close(f"output {position}", ours, theirs, tolerance)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, theirs in expected.gradients.items():
        ours = found.gradients[name]
        if exact is not None and exact.gradients[name].norm() <= 1e-6 * theirs.norm():
            assert ours.norm() <= 10 * theirs.norm(), f"{name}: zero in exact arithmetic, and larger than eager's noise"
        else:
            _close(f"gradient of {name}", ours, theirs, tolerance)


def exact(call, *args) -> Step:
    """The same call in float64, on the rounded inputs."""
    wide = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    return step(call, wide)


def compiled_step(call, *args, backend="aot_eager", rules="stable-bf16"):
    torch._dynamo.reset()
    compiled = precisionpass.compile(call, rules=rules, backend=backend)
    return step(compiled, args), precisionpass.report(compiled)


def at_least_as_good(call, *args, backend="aot_eager", rules="stable-bf16", factor: float = 1.0, rewritten=1):
    """Outputs and gradients nearer to float64 than eager's own, or equal."""
    ours, report = compiled_step(call, *args, backend=backend, rules=rules)
    theirs, truth = step(call, args), exact(call, *args)
    assert sum(counts(report).values()) == rewritten, report.text()
    pairs = [("output", o, t, e) for o, t, e in zip(ours.outputs, theirs.outputs, truth.outputs, strict=True)]
    pairs += [(name, ours.gradients[name], theirs.gradients[name], truth.gradients[name]) for name in truth.gradients]
    for name, our, their, true in pairs:
        assert our.isfinite().all(), name
        bound = relative(their, true) if their.isfinite().all() else math.inf
        assert relative(our, true) <= factor * bound + 1e-7, f"{name}: {relative(our, true):.2e} against {bound:.2e}"


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||theirs|| in float64."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))


def counts(report, decision: str = "rewritten") -> dict[str, int]:
    """kind -> number of sites with this decision."""
    kinds = [site.kind for site in report.sites if site.decision == decision for _ in range(site.count)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def reasons(report) -> set[str]:
    """The reason codes of everything that was found and not rewritten."""
    return {s.reason for s in report.sites if s.decision != "rewritten"} | {m.reason for m in report.near_misses}


def _close(what: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{what}: {ours.shape} {ours.dtype}"
    finite = theirs.isfinite()
    assert torch.equal(ours[~finite], theirs[~finite]) or torch.equal(ours.isfinite(), finite), f"{what}: not finite"
    assert torch.equal(ours.isnan(), theirs.isnan()), f"{what}: nan at other places"
    if not theirs.dtype.is_floating_point:
        assert torch.equal(ours, theirs), what
        return
    error = relative(ours[finite], theirs[finite]) if finite.any() else 0.0
    assert error <= tolerance, f"{what}: relative difference {error:.2e}"


def _fresh(leaf):
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def in_float64(call: Callable, args=(), kwargs=None, training: bool = True, seed: int = 0) -> Step | None:
    """The same step in float64."""
    if not training:
        return None
    args, kwargs = tree_map(_widened, (tuple(args), dict(kwargs or {})))
    wide = copy.deepcopy(call).double() if isinstance(call, torch.nn.Module) else call
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            return step(wide, args, kwargs, training, seed)
    finally:
        torch.set_default_dtype(torch.float32)


class Float64(TorchFunctionMode):
    """What the model itself computes in float32, such as softmax(dtype=torch.float32), is computed in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args, kwargs = tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs or {}))
        return function(*args, **kwargs)


def _widened(leaf):
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.detach().double().requires_grad_(leaf.requires_grad)
    return leaf
