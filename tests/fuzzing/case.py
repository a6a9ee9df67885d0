"""A random case: its source and its inputs; run as it is, and rewritten without Dynamo or through it."""

from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from precisionpass import pipeline
from precisionpass.rules import load
from precisionpass.rules.model import Rule
from tests.agreement import Float64

EVERYTHING = load([
    Rule(id="attention", match={"op": "attention"}, apply={"implementation": "auto"}),
    Rule(id="rows", match={"op": ["softmax", "log_softmax", "layer_norm", "rms_norm"]},
         apply={"implementation": "auto", "lowering": "kernel"}),
])  # fmt: skip
TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}


@dataclass(frozen=True)
class Input:
    """kind: normal | mask (True where a key is allowed, sometimes nowhere) | positive."""

    shape: tuple[int, ...]
    dtype: str
    kind: str = "normal"
    memory: str = "contiguous"


@dataclass(frozen=True)
class Case:
    """A function's body, line by line, over named inputs. `plain`: nothing in it may keep it from being found."""

    lines: tuple[str, ...]
    inputs: dict[str, Input]
    plain: bool

    def __repr__(self) -> str:
        inputs = "".join(f"    # {name}: {spec}\n" for name, spec in self.inputs.items())
        return f"\n{inputs}{self.source}"

    @property
    def source(self) -> str:
        return f"def call({', '.join(self.inputs)}):\n" + "".join(f"    {line}\n" for line in self.lines)

    @property
    def tolerance(self) -> float:
        """That of the narrowest format that the case's own source rounds to anywhere."""
        read = [TOLERANCE.get(spec.dtype, 0.0) for spec in self.inputs.values()]
        return max([*read, TOLERANCE["float32"] if "float" in self.source else 0.0])

    def function(self, torch=torch):
        namespace = {"torch": torch, "F": functional}
        exec(self.source, namespace)
        return namespace["call"]

    def tensors(self, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [_made(spec, generator) for spec in self.inputs.values()]


def _made(spec: Input, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = spec.shape, getattr(torch, spec.dtype)
    wide = (*shape[:-1], 2 * shape[-1]) if spec.memory == "sliced" else shape
    wide = (*wide[:-2], *wide[-2:][::-1]) if spec.memory == "transposed" else wide
    made = torch.randn(wide, generator=generator, dtype=torch.float64)
    made = made.abs() + 0.1 if spec.kind == "positive" else made
    made = made > -0.7 if spec.kind == "mask" else made.to(dtype)
    if spec.memory == "sliced":
        made = made[..., ::2]
    elif spec.memory == "transposed" and len(shape) > 1:
        made = made.mT
    return made.requires_grad_(made.is_floating_point())


class _Traced:
    """torch while tracing: what makes a tensor out of nothing is a call in the graph, too."""

    def __init__(self, tracer: fx.Tracer):
        self.tracer = tracer

    def __getattr__(self, name: str):
        function = getattr(torch, name)
        if name not in ("ones", "full", "arange"):
            return function
        return lambda *args, **kwargs: self.tracer.create_proxy("call_function", function, args, kwargs)


class _Examples(fx.Interpreter):
    def run_node(self, node):
        node.meta["example_value"] = super().run_node(node)
        return node.meta["example_value"]


def captured(case: Case) -> fx.GraphModule:
    """The graph as Dynamo has it, made without Dynamo: calls of torch and methods, example values on every node."""
    tracer, mode = fx.Tracer(), FakeTensorMode()
    module = fx.GraphModule(torch.nn.Module(), tracer.trace(case.function(_Traced(tracer))))
    with mode:
        _Examples(module).run(*[mode.from_tensor(t) for t in case.tensors()])
    return module


def rewritten(case: Case):
    """(the rewritten graph, its report)"""
    module = captured(case)
    return module, pipeline.run(module, EVERYTHING, {}, training=True)


def step(call, tensors: list[torch.Tensor]):
    """Outputs and gradients (None where the model itself has none or cannot be differentiated)."""
    fresh = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad) for t in tensors]
    outputs = call(*fresh)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    weights = torch.Generator().manual_seed(7)
    loss = sum((o.double() * torch.randn(o.shape, generator=weights, dtype=torch.float64)).sum() for o in outputs)
    floating = [t for t in fresh if t.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, floating, allow_unused=True)
    except RuntimeError as problem:
        if "inplace operation" not in str(problem):
            raise
        gradients = [None] * len(floating)
    return [o.detach() for o in outputs], list(gradients)


def assert_same(case: Case, ours) -> None:
    """Formats, shapes and places of NaN as eager has them; near eager norm-wise, or as near to float64 as eager is.

    A softmax without its maximum taken away is NaN in eager where nothing or too much is left; the op is not.
    """
    call, tensors = case.function(), case.tensors()
    theirs, exact = step(call, tensors), None
    for part, factor in ((0, 1), (1, 4)):
        largest = max((_norm(e) for e in theirs[part] if e is not None), default=0.0)
        for position, (a, b) in enumerate(zip(ours[part], theirs[part], strict=True)):
            if b is None or (part == 1 and not all(t.isfinite().all() for t in (*theirs[0], b))):
                continue  # a gradient through an infinity says nothing
            what = f"{('output', 'gradient')[part]} {position}"
            a = torch.zeros_like(b) if a is None else a
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {a.shape} {a.dtype}, eager {b.shape} {b.dtype}"
            known = (
                ~b.isnan()
                if any(risky in case.source for risky in ("s.exp()", " - m)", "logaddexp"))
                else torch.ones_like(b, dtype=torch.bool)
            )
            assert torch.equal(a[known].isnan(), b[known].isnan()), f"{what}: NaN at other places"
            error = _norm((a.double() - b.double())[known]) / max(_norm(b), 1e-2 * largest, 1e-30)
            if error > factor * case.tolerance:
                exact = exact or in_float64(call, tensors)
                off, eager_off = (_norm(t.double() - exact[part][position]) for t in (a, b))
                assert off <= 1.5 * eager_off, f"{what}: {error:.1e}, of it eager {eager_off / off:.0%}"


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().nan_to_num(0, 0, 0).norm())


def in_float64(call, tensors: list[torch.Tensor]):
    """The same step with every format as wide as float64."""
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    with Float64():
        return step(call, wide)
