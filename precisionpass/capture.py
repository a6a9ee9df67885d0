"""What torch.compile captured: the graph, its child graphs, and where each node came from.

Private torch API used here, in one place: the fake mode's shape environment (sizes and guards), Dynamo's module stack
in a node's meta, and Dynamo itself for a capture without compilation. `tests/test_capture.py` says so first when a new
torch moves one of them.
"""

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
from torch.utils._pytree import tree_map

from precisionpass import graph
from precisionpass.errors import PrecisionPassError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')


@dataclass(frozen=True)
class Origin:
    """Where a site is: exact dotted module name, the module's class, the user's file:line."""

    module: str
    module_class: str
    source: str


@dataclass(frozen=True)
class Captured:
    """One captured graph. `name`: "0", or "0.1" for a child. `modules`: id of a module, as text -> its exact name."""

    module: fx.GraphModule
    name: str
    modules: Mapping[str, str]
    training: bool

    def origin(self, nodes: Iterable[fx.Node]) -> Origin:
        """The innermost module that all of the nodes belong to, and the line of the last one that has one."""
        stacks = [tuple(stack.items()) for node in nodes if (stack := node.meta.get("nn_module_stack"))]
        common = _common(stacks)
        traces = [trace for node in nodes if (trace := node.meta.get("stack_trace"))]
        if not common:
            return Origin("", "", _source(traces))
        key, (path, module_class) = common[-1]
        name = self.modules.get(str(key).split("@")[0])
        return Origin(
            _readable(path) if name is None else name,
            getattr(module_class, "__name__", str(module_class)),
            _source(traces),
        )

    @property
    def wants_gradients(self) -> bool:
        """Whether anything the graph reads requires a gradient."""
        inputs = (graph.value(n) for n in self.module.graph.nodes if n.op == "placeholder")
        return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)

    def sized(self, size):
        """A size expression as a symbolic number of the captured shape environment; plain numbers as they are."""
        if isinstance(size, int | float | str | bool):
            return size
        size = sympy.sympify(size)
        if size.is_number:
            return int(size)
        environment = self._shape_env()
        assert environment is not None
        known = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
        hint = size.xreplace(known)
        return environment.create_symintnode(size, hint=int(hint) if hint.is_number else None)

    def _shape_env(self) -> ShapeEnv | None:
        for node in self.module.graph.nodes:
            value = graph.value(node)
            if isinstance(value, torch.SymInt):
                return value.node.shape_env
            if isinstance(value, torch.Tensor) and getattr(value, "fake_mode", None) is not None:
                return value.fake_mode.shape_env  # type: ignore[attr-defined]
        return None


def holds(condition) -> bool:
    """Today's truth of a condition on sizes, guarded: another size that changes it compiles again."""
    return bool(condition) if isinstance(condition, bool) else guard_or_false(condition)


def captured_graphs(
    module: fx.GraphModule, name: str, modules: Mapping[str, str], training: bool
) -> tuple[Captured, ...]:
    """The graph and its child graphs (checkpoint bodies, branches), each on its own."""
    own = [Captured(module, name, modules, training)]
    children = [child for _, child in sorted(module.named_children()) if isinstance(child, fx.GraphModule)]
    for position, child in enumerate(children):
        own += captured_graphs(child, f"{name}.{position}", modules, training)
    return tuple(own)


def module_names(model: torch.nn.Module | None) -> dict[str, str]:
    """id of every module, as Dynamo writes it, to its exact dotted name; the first name of a shared module counts."""
    names: dict[str, str] = {}
    if model is not None:
        for name, module in model.named_modules(remove_duplicate=True):
            names.setdefault(str(id(module)), name)
    return names


def dry_run(
    call: Callable, args: tuple, kwargs: Mapping, look: Callable[[fx.GraphModule], None], dynamic: bool | None = None
) -> None:
    """Capture every graph of one call without running any: each goes to `look`, zeros of the right shape come back.

    Modules, buffers, arguments and random numbers are as before afterwards. Raises PrecisionPassError where torch
    cannot capture the call, and whatever the model's own code or `look` raises.
    """

    def backend(module: fx.GraphModule, inputs):
        outputs = [_stand_in(module, output) for output in _outputs(module)]
        look(module)
        return lambda *actual: tuple(value(actual) for value in outputs)

    model = call if isinstance(call, torch.nn.Module) else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=100_000, accumulated_recompile_limit=100_000))
        stack.enter_context(_restored(model))
        args, kwargs = tree_map(_own_copy, (args, dict(kwargs)))
        try:
            torch.compile(call, backend=backend, dynamic=dynamic)(*args, **kwargs)
        except BackendCompilerFailed as problem:
            raise (
                problem.inner_exception if isinstance(problem.inner_exception, PrecisionPassError) else problem
            ) from None
        except TorchDynamoException as problem:
            name = type(call).__name__ if model is not None else getattr(call, "__name__", str(call))
            raise PrecisionPassError(
                "the model could not be captured", where=name, why=str(problem).strip().split("\n\n")[0][:600],
                fix="make the call work under torch.compile(model) first; its message above names the line", code="PP401",
            ) from problem  # fmt: skip


def _outputs(module: fx.GraphModule) -> list:
    return list(next(n for n in module.graph.nodes if n.op == "output").args[0])


def _stand_in(module: fx.GraphModule, output) -> Callable:
    """What a captured graph's output is replaced by: an input as it is, else zeros."""
    if not isinstance(output, fx.Node):
        return lambda actual: output
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    if output in inputs:
        position = inputs.index(output)
        return lambda actual: actual[position]
    value = graph.value(output)
    if not isinstance(value, torch.Tensor):
        return lambda actual: graph.hint(value)
    shape, wants = [graph.hint(s) for s in value.shape], value.requires_grad
    return lambda actual: torch.zeros(shape, dtype=value.dtype, device=value.device).requires_grad_(wants)


def _own_copy(leaf):
    """An argument whose changes do not reach the user's: tensors share memory (no graph is run), objects are copied."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf  # what cannot be copied is passed as it is


@contextlib.contextmanager
def _restored(model: torch.nn.Module | None) -> Iterator[None]:
    """Attributes, buffers and an earlier in-place compilation of every module are as before on leaving."""
    modules = [] if model is None else list(model.modules())
    held = [
        (m, dict(m.__dict__), {k: dict(m.__dict__[k]) for k in ("_buffers", "_parameters", "_modules")})
        for m in modules
    ]
    buffers = [(b, b._version, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    for module in modules:
        module.__dict__.pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        for module, attributes, tables in held:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, table in tables.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(table)
        with torch.no_grad():
            for buffer, version, content in buffers:
                if buffer._version != version:
                    buffer.copy_(content)


def _common(stacks: list[tuple]) -> tuple:
    """The modules, outermost first, that all the stacks begin with."""
    shared = []
    for levels in zip(*stacks, strict=False):
        if any(level[0] != levels[0][0] for level in levels):
            break
        shared.append(levels[0])
    return tuple(shared)


def _readable(path: str) -> str:
    """`L['self'].model.layers[0].attn` as `model.layers.0.attn`."""
    path = re.sub(r"^L\[['\"][^'\"]*['\"]\]\.?", "", path)
    path = re.sub(r"\._modules\[['\"]([^'\"]*)['\"]\]|\[['\"]?([^'\"\]]*)['\"]?\]", lambda m: f".{m[1] or m[2]}", path)
    return path.strip(".")


def _source(traces: list[str]) -> str:
    """file:line of the user's innermost frame: below the working directory or site-packages, without machine paths."""
    for trace in traces:
        frames = [(file, line) for file, line in _FRAME.findall(trace) if not file.startswith(_TORCH)]
        if frames:
            file, line = frames[-1]
            return f"{_short_path(file)}:{line}"
    return ""


def _short_path(file: str) -> str:
    for part in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if part in file:
            return file.split(part, 1)[1]
    try:
        inside = os.path.relpath(file)
    except ValueError:
        return os.path.basename(file)
    return os.path.basename(file) if inside.startswith("..") else inside
