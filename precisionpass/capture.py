"""What torch.compile captured: the graph, its child graphs, and where each node came from.

Private torch API used here, in one place: the fake mode's shape environment (sizes and guards), Dynamo's module stack
in a node's meta, Dynamo itself for a capture without compilation, and the one place where torch.nn's transformers
cannot be captured. `tests/test_capture.py` says so first when a new torch moves one of them.
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.utils import get_compilation_metrics
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
from torch.utils._pytree import tree_map

from precisionpass import fast_paths, graph
from precisionpass.errors import PrecisionPassError
from precisionpass.preserve import own_copy, restored
from precisionpass.stand_ins import stand_ins

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]*)", line (\d+)[^\n]*(?:(?=\n *([^\n]*))|)')

torch.compiler.substitute_in_graph(torch.nn.modules.transformer._detect_is_causal_mask)(fast_paths.is_causal_mask)


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

    def origin(self, nodes: Sequence[fx.Node]) -> Origin:
        """The innermost module that all of the nodes belong to, and the line of the last one that has one.

        After a graph break the nodes know no module: then it is the one whose parameters the nodes read.
        """
        stacks = [tuple(stack.items()) for node in nodes if (stack := node.meta.get("nn_module_stack"))]
        common = _common(stacks)
        traces = [trace for node in nodes if (trace := node.meta.get("stack_trace"))]
        if not common:
            return Origin(self._owner(nodes), "", _source(traces))
        key, (path, module_class) = common[-1]
        name = self.modules.get(str(key).split("@")[0])
        return Origin(
            _readable(path) if name is None else name,
            getattr(module_class, "__name__", str(module_class)),
            _source(traces),
        )

    def _owner(self, nodes: Sequence[fx.Node]) -> str:
        """The module whose own code the nodes are, told by the nearest parameters that they read.

        A parameter is known by its exact name in the model and by its path from that module: what the path lacks.
        """
        owners, pending, seen = set(), list(nodes), set(nodes)
        while pending:
            inputs = pending.pop().all_input_nodes
            held = [n for n in inputs if n.meta.get("parameter") in self.modules]
            owners |= {_before(self.modules[n.meta["parameter"]], _readable(n.meta["path"])) for n in held}
            fresh = [] if held else [n for n in inputs if n not in seen]
            seen.update(fresh)
            pending += fresh
        return owners.pop() if len(owners) == 1 else ""

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
    """id of every module, as Dynamo writes it, to its exact dotted name, and of every parameter to its module's.

    The first name of a shared one counts.
    """
    names: dict[str, str] = {}
    if model is not None:
        for name, module in model.named_modules(remove_duplicate=True):
            names.setdefault(str(id(module)), name)
            for parameter in module.parameters(recurse=False):
                names.setdefault(f"parameter {id(parameter)}", name)
    return names


def dry_run(
    call: Callable, args: tuple, kwargs: Mapping, look: Callable[[fx.GraphModule], None], dynamic: bool | None = None
) -> tuple[list[int], list[str]]:
    """Capture every graph of one call without running any: each goes to `look`, zeros of the right shape come back.

    Returns how often each graph was called (after a graph break one graph may serve many layers), and what torch could
    not capture, in words.
    Modules, buffers, arguments and random numbers are as before afterwards. Raises PrecisionPassError where torch
    cannot capture the call, and whatever the model's own code or `look` raises.
    """

    def backend(module: fx.GraphModule, inputs):
        answer, number = stand_ins(module), len(calls)
        look(module)
        calls.append(0)

        def called(*actual) -> tuple:
            calls[number] += 1
            return answer(*actual)

        return called

    calls: list[int] = []
    seen = {id(metrics) for metrics in get_compilation_metrics()}
    model = call if isinstance(call, torch.nn.Module) else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=100_000, accumulated_recompile_limit=100_000))
        stack.enter_context(restored(model))
        args, kwargs = tree_map(own_copy, (args, dict(kwargs)))
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
                fix="make the call work under torch.compile(model) first; its message above names the line",
                code="PP401",
            ) from problem  # fmt: skip
    return calls, _not_captured([metrics for metrics in get_compilation_metrics() if id(metrics) not in seen])


def _not_captured(frames: list) -> list[str]:
    """Where torch.compile broke the graph, or gave up on a whole function, and its reason."""
    found: dict[str, None] = {}
    for frame in frames:
        where = f"{frame.co_name} ({_short_path(frame.co_filename)}:{frame.co_firstlineno})"
        if frame.fail_reason:
            found[f"torch.compile runs {where} as it is, uncaptured: {_why(frame.fail_reason)}"] = None
        for reason in sorted(frame.restart_reasons or ()):
            found[f"torch.compile breaks the graph in {where}: {_why(reason)}"] = None
    return list(found)


def _why(reason: str) -> str:
    """Dynamo's headline and its explanation, without its hints and debug context."""
    headline = (reason.strip().splitlines() or [""])[0][:200]
    explained = re.search(r"^\s*Explanation: (.*)$", reason, re.MULTILINE)
    return headline + (f" ({explained[1][:200]})" if explained else "")


def _common(stacks: list[tuple]) -> tuple:
    """The modules, outermost first, that all the stacks begin with."""
    shared = []
    for levels in zip(*stacks, strict=False):
        if any(level[0] != levels[0][0] for level in levels):
            break
        shared.append(levels[0])
    return tuple(shared)


def _before(owner: str, path: str) -> str:
    """`model.layers.0.attn` for the parameter of `model.layers.0.attn.q`, whose path is `q.weight`."""
    inside = path.rpartition(".")[0]
    return owner.removesuffix(inside).rstrip(".") if owner.endswith(inside) else ""


def _readable(path: str) -> str:
    """`L['self'].model.layers[0].attn` as `model.layers.0.attn`."""
    path = re.sub(r"^L\[['\"][^'\"]*['\"]\]", "", path)
    path = re.sub(r"(?:\._modules|\._parameters)?\[(['\"]?)(.*?)\1\]", r".\2", path)
    return path.strip(".")


def _source(traces: list[str]) -> str:
    """file:line of the user's innermost frame: below the working directory or site-packages, without machine paths."""
    return next((source for source, _ in map(user_line, traces) if source), "")


def user_line(trace: str) -> tuple[str, str]:
    """The user's innermost frame of a stack trace: its file:line, and what stands there; both "" if there is none."""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_TORCH)]
    if not frames:
        return "", ""
    file, line, text = frames[-1]
    return f"{_short_path(file)}:{line}", "" if text.startswith('File "') else text


def _short_path(file: str) -> str:
    for part in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if part in file:
            return file.split(part, 1)[1]
    try:
        inside = os.path.relpath(file)
    except ValueError:
        return os.path.basename(file)
    return os.path.basename(file) if inside.startswith("..") else inside
