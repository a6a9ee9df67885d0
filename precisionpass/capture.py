"""What torch.compile captured: the graph, its child graphs, and where each node came from.

Private torch API used here, in one place: the fake mode's shape environment (sizes and guards), Dynamo's module stack
in a node's meta, Dynamo itself for a capture without compilation, and the one place where torch.nn's transformers
cannot be captured. `tests/test_capture.py` says so first when a new torch moves one of them.
"""

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_compilation_metrics
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false, statically_known_true
from torch.utils._pytree import tree_map

from precisionpass import fast_paths, graph
from precisionpass.errors import PrecisionPassError
from precisionpass.origin import Origin, owner_before, readable, shared_modules, short_path, source_line
from precisionpass.preserve import own_copy, restored
from precisionpass.stand_ins import stand_ins

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

torch.compiler.substitute_in_graph(torch.nn.modules.transformer._detect_is_causal_mask)(fast_paths.is_causal_mask)


@dataclass(frozen=True)
class Ambient:
    """What a child graph's calls run under besides what stands in it: (device type, dtype, enabled), and the grad mode.

    `gradients`: None for the mode that compilation runs in.
    """

    autocasts: tuple[tuple[str, torch.dtype | None, bool], ...] = ()
    gradients: bool | None = None


NOTHING_AROUND = Ambient()


@dataclass(frozen=True)
class Captured:
    """One captured graph. `name`: "0", or "0.1" for a child. `modules`: id of a module, as text -> its exact name.

    `guarded`: whether torch checks what is assumed of symbolic sizes at every call, as Dynamo does and export does not.
    `frame`: name and class of the module whose function is captured, where it is known.
    """

    module: fx.GraphModule
    name: str
    modules: Mapping[str, str]
    training: bool
    guarded: bool = True
    ambient: Ambient = NOTHING_AROUND
    frame: tuple[str, str] = ("", "")

    def origin(self, nodes: Sequence[fx.Node]) -> Origin:
        """The innermost module that all of the nodes belong to, and the line of the last one that has one.

        Where they share none but the model itself it is the one that more than half of them belong to. After a graph
        break the nodes know no module: then it is the one whose parameters the nodes read, or the one whose function
        it is.
        """
        stacks = [tuple(stack.items()) for node in nodes if (stack := node.meta.get("nn_module_stack"))]
        common = shared_modules(stacks)
        if len(common) < 2 and stacks:
            stack, times = Counter(stacks).most_common(1)[0]
            common = stack if 2 * times > len(stacks) else common
        traces = [trace for node in nodes if (trace := node.meta.get("stack_trace"))]
        if not common:
            owner = self._owner(nodes)
            return Origin(*((owner, "") if owner else self.frame), source_line(traces))
        key, (path, module_class) = common[-1]
        name = self.modules.get(str(key).split("@")[0])
        return Origin(
            readable(path) if name is None else name,
            getattr(module_class, "__name__", str(module_class).rpartition(".")[2]),
            source_line(traces),
        )

    def _owner(self, nodes: Sequence[fx.Node]) -> str:
        """The module whose own code the nodes are, told by the nearest parameters that they read.

        A parameter is known by its exact name in the model and by its path from that module: what the path lacks.
        """
        owners, pending, seen = set(), list(nodes), set(nodes)
        while pending:
            inputs = pending.pop().all_input_nodes
            held = [n for n in inputs if n.meta.get("parameter") in self.modules]
            owners |= {owner_before(self.modules[n.meta["parameter"]], readable(n.meta["path"])) for n in held}
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

    def holds(self, condition) -> bool:
        """Today's truth of a condition on sizes: another size that changes it compiles again.

        Without guards only what holds for every size is true.
        """
        if isinstance(condition, bool):
            return condition
        return guard_or_false(condition) if self.guarded else statically_known_true(condition)

    def _shape_env(self) -> ShapeEnv | None:
        for node in self.module.graph.nodes:
            value = graph.value(node)
            if isinstance(value, torch.SymInt):
                return value.node.shape_env
            if isinstance(value, torch.Tensor) and getattr(value, "fake_mode", None) is not None:
                return value.fake_mode.shape_env  # type: ignore[attr-defined]
        return None


def captured_graphs(
    module: fx.GraphModule, modules: Mapping[str, str], training: bool, guarded: bool = True
) -> tuple[Captured, ...]:
    """The graph and its child graphs (checkpoint bodies, branches), each on its own.

    A child that is called under different autocast or gradient modes is left out: one graph cannot serve both.
    """
    return tuple(_with_children(Captured(module, "0", modules, training, guarded, frame=_frame(modules))))


def _frame(modules: Mapping[str, str]) -> tuple[str, str]:
    """Name and class of the module in the frame that Dynamo is at: its `self`, or the only one that it was given.

    A function without one belongs to the module that called it.
    """
    try:
        held = InstructionTranslator.current_tx().f_locals
    except AttributeError:  # not called from within Dynamo
        return "", ""
    given = [held["self"]] if "self" in held else list(held.values())
    found = {modules[str(id(v))]: type(v).__name__ for v in given if str(id(v)) in modules}
    if len(found) == 1:
        return found.popitem()
    caller = sys._getframe()
    while (caller := caller.f_back) is not None:
        owner = caller.f_locals.get("self")
        if str(id(owner)) in modules:
            return modules[str(id(owner))], type(owner).__name__
    return "", ""


def _with_children(parent: Captured) -> Iterator[Captured]:
    yield parent
    children = [(n, child) for n, child in sorted(parent.module.named_children()) if isinstance(child, fx.GraphModule)]
    around = _ambients(parent) if children else {}
    for position, (name, child) in enumerate(children):
        if len(modes := around.get(name, {parent.ambient})) == 1:
            inside = replace(parent, module=child, name=f"{parent.name}.{position}", ambient=modes.pop())
            yield from _with_children(inside)


def _ambients(parent: Captured) -> dict[str, set[Ambient]]:
    """For each child graph what it is called under, every call counted."""
    found: dict[str, set[Ambient]] = {}
    regions: dict[fx.Node, tuple] = {}
    gradients = parent.ambient.gradients
    for node in parent.module.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            regions[node] = tuple(node.args[:3])
        elif node.target is EXIT_AUTOCAST:
            regions.pop(node.args[0], None)
        elif node.target is torch._C._set_grad_enabled:
            gradients = bool(node.args[0])
        autocasts, inner = (*parent.ambient.autocasts, *regions.values()), gradients
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            autocasts += (tuple(node.args[:3]),)
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            inner = bool(node.args[0])
        for read in node.all_input_nodes:
            if read.op == "get_attr":
                found.setdefault(str(read.target), set()).add(Ambient(autocasts, inner))
    return found


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
        if frame.co_filename is None:  # what another thread is just compiling
            continue
        where = f"{frame.co_name} ({short_path(frame.co_filename)}:{frame.co_firstlineno})"
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
