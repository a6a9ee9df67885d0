"""A random case: its source and its inputs; run as it is, and rewritten without Dynamo or through it."""

from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from precisionpass import pipeline
from precisionpass.rules import load
from precisionpass.rules.model import Rule

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


def assert_same(ours, theirs, tolerance: float) -> None:
    """Formats, shapes and places of NaN as eager has them; norm-wise near, small gradients beside the largest one."""
    for (found, expected), factor in zip(zip(ours, theirs, strict=True), (1, 4), strict=True):
        largest = max((float(e.double().nan_to_num(0, 0, 0).norm()) for e in expected if e is not None), default=0.0)
        for position, (a, b) in enumerate(zip(found, expected, strict=True)):
            what = f"{'output' if factor == 1 else 'gradient'} {position}"
            if b is None or (factor == 4 and not b.isfinite().all()):
                continue  # a gradient through an infinity says nothing
            a = torch.zeros_like(b) if a is None else a
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {a.shape} {a.dtype}, eager {b.shape} {b.dtype}"
            assert torch.equal(a.isnan(), b.isnan()), f"{what}: NaN at other places"
            a, b = (t.double().nan_to_num(0, 0, 0) for t in (a, b))
            error = float((a - b).norm()) / max(float(b.norm()), 1e-2 * largest, 1e-30)
            assert error <= factor * tolerance, f"{what}: relative difference {error:.1e}"
