"""The shadow: a throw-away lowering of a captured graph to one spelling per operation, for analysis only.

Dynamo's graph has many spellings of the same thing; pre-dispatch ATen has one each, with dtypes and shapes, and keeps
matmul, linear, einsum, dropout, layer_norm and scaled_dot_product_attention whole. The shadow is never run and never
handed on. A graph that cannot be shadowed costs coverage, never correctness.

Private torch API used here, in one place: proxy slots and the pre-dispatch mode of `make_fx`, the fake mode of the
tracing context, suppressed guards. `tests/test_shadow.py` says so first when a new torch moves one of them.
"""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload, _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx, track_tensor_tree
from torch.utils._pytree import tree_leaves, tree_map

from precisionpass import fast_paths, graph
from precisionpass.capture import ENTER_AUTOCAST, EXIT_AUTOCAST, NOTHING_AROUND, Ambient

log = logging.getLogger("precisionpass")

_WRITTEN_OUT = {
    torch._transformer_encoder_layer_fwd: fast_paths.encoder_layer,  # pyright: ignore[reportPrivateImportUsage]
    torch._native_multi_head_attention: fast_paths.multi_head_attention,  # pyright: ignore[reportPrivateImportUsage]
}
_OPENERS, _CLOSERS = ("_increment_nesting", "_enter_dual_level"), ("_decrement_nesting", "_exit_dual_level")


@dataclass(frozen=True)
class Shadow:
    """One spelling per operation, tied to the captured graph it came from."""

    graph: fx.Graph
    image: dict[fx.Node, object]  # captured node -> shadow node, or a tuple/list of them
    source: dict[fx.Node, fx.Node]  # shadow node -> the captured node whose whole value it is
    owner: dict[fx.Node, fx.Node]  # shadow node -> the captured call that it is a part of
    opaque: frozenset[fx.Node] = field(default_factory=frozenset)  # captured calls that were not looked into
    ambient: Ambient = NOTHING_AROUND


_ANCHOR_WORDS = ("softmax", "attention", "attn", "encoder_layer", "exp", "norm", "rsqrt", "sqrt", "pow", "std")


def holds_anchor(module: fx.GraphModule) -> bool:
    """Whether the graph calls anything that a site could be found from; a graph that does not is never shadowed."""
    names = (str(getattr(n.target, "__name__", n.target)) for n in module.graph.nodes if n.op.startswith("call_"))
    return any(word in name for name in names for word in _ANCHOR_WORDS)


def make_shadow(module: fx.GraphModule, ambient: Ambient = NOTHING_AROUND) -> Shadow:
    """Lower `module`, a captured graph whose placeholders carry fake example values, to its shadow.

    Leaves the grad mode, autocast state, random numbers, guards and tracing context as they were.
    Raises whatever tracing raises; the caller turns that into "this graph was left alone".
    """
    inputs = [graph.value(n) for n in module.graph.nodes if n.op == "placeholder"]
    # a metadata change in the graph (t_, resize_) must not reach the captured example values
    inputs = [_detached(x) if isinstance(x, torch.Tensor) and x.dim() else x for x in inputs]
    interpreter = _Shadowing(module)
    with _undisturbed(_fake_mode(module), ambient):
        traced = make_fx(
            interpreter.run,
            tracing_mode="real",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
            record_module_stack=False,
        )(*inputs)
    placeholders = (n for n in traced.graph.nodes if n.op == "placeholder")
    for node, captured in zip(placeholders, (n for n in module.graph.nodes if n.op == "placeholder"), strict=True):
        if isinstance(graph.value(captured), torch.nn.Parameter):
            argument = captured.meta.get("grapharg")
            node.meta["parameter"] = f"parameter {id(argument.example)}" if argument is not None else "parameter"
            name = getattr(argument, "source", None) and argument.source.name
            # L['self']._modules['q']._parameters['weight']
            node.meta["path"] = name() if callable(name) else name or ""
        node.meta |= {key: captured.meta[key] for key in ("parameter", "constant") if key in captured.meta}
    image, source = {}, {}
    names = {n.name: n for n in traced.graph.nodes}
    for captured, value in interpreter.images.items():
        image[captured] = tree_map(lambda name: names.get(name) if isinstance(name, str) else None, value)
        if isinstance(image[captured], fx.Node):
            source.setdefault(image[captured], captured)
            image[captured].meta["captured"] = source[image[captured]].name
    owner = {names[name]: captured for name, captured in interpreter.owners.items() if name in names}
    for captured in [*interpreter.opaque, *(n for n in module.graph.nodes if n.op == "output")]:
        for read in captured.all_input_nodes:
            for node in tree_leaves(image.get(read)):
                if isinstance(node, fx.Node):
                    node.meta["used"] = True
    _mark_live(traced)
    return Shadow(traced.graph, image, source, owner, frozenset(interpreter.opaque), ambient)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Its own tensor on the same memory. (Not for one without dimensions: it remembers the number it was made from.)"""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _mark_live(traced: fx.GraphModule) -> None:
    """meta["live"]: something comes of the node. meta["constant"]: the number that a constant tensor holds."""
    for node in reversed(traced.graph.nodes):
        node.meta["live"] = (
            "used" in node.meta
            or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable)
            or any(user.meta["live"] for user in node.users)
        )
        if node.op == "get_attr":
            held = getattr(traced, str(node.target))
            held = getattr(held, "constant", None) if isinstance(held, FakeTensor) else held
            if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor) and held.numel() == 1:
                node.meta["constant"] = held.item()


class _Shadowing(fx.Interpreter):
    """Runs the captured graph under `make_fx`, noting which shadow nodes each captured node became."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.images: dict[fx.Node, object] = {}
        self.owners: dict[str, fx.Node] = {}
        self.opaque: list[fx.Node] = []
        self.depth = 0  # functorch nesting: between an opener and its closer everything is opaque
        self.autocasts: dict[fx.Node, torch.autocast] = {}

    def run(self, *inputs):
        try:
            super().run(*inputs)
        finally:
            for region in reversed(self.autocasts.values()):
                region.__exit__(None, None, None)
            self.autocasts.clear()
        return ()

    def run_node(self, node: fx.Node):
        tracer = _tracer()
        before = next(iter(reversed(tracer.graph.nodes)), None)
        result = self._evaluate(node)
        created = _nodes_after(tracer.graph, before)
        for made in created:
            self.owners.setdefault(made.name, node)
            made.meta["grad"] = torch.is_grad_enabled()
            for key in ("nn_module_stack", "stack_trace"):
                if key in node.meta:
                    made.meta[key] = node.meta[key]
        if node.op != "output":
            self.images[node] = tree_map(lambda leaf: _proxy_name(leaf, tracer), result)
        return result

    def _evaluate(self, node: fx.Node):
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function":
            if node.target is ENTER_AUTOCAST:
                self.autocasts[node] = _autocast(*node.args[:3])
                self.autocasts[node].__enter__()
                return node
            if node.target is EXIT_AUTOCAST:
                region = self.autocasts.pop(node.args[0], None)
                if region is not None:
                    region.__exit__(None, None, None)
                return None
            if name.endswith(_OPENERS):
                self.depth += 1
            if name.endswith(_CLOSERS):
                self.depth -= 1
        if node.op in ("placeholder", "output"):
            return super().run_node(node)
        inside = self.depth > 0 or name.endswith(_CLOSERS)
        if node.op == "get_attr":
            return self._attribute(node, self.fetch_attr(node.target))
        if inside or isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            return self._opaque(node)
        written_out = _WRITTEN_OUT.get(node.target) if node.op == "call_function" else None
        if written_out is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            return written_out(*args, **kwargs)
        return super().run_node(node)

    def _attribute(self, node: fx.Node, held):
        """A module as it is; a tensor that the graph holds (a whole train step holds its parameters) as a fake one."""
        example = graph.value(node)
        if not isinstance(held, torch.Tensor) or not isinstance(example, FakeTensor):
            return held
        tracer = _tracer()
        proxy = tracer.create_proxy("call_function", held_tensor, (), {})
        return track_tensor_tree(_detached(example), proxy, constant=None, tracer=tracer)

    def _opaque(self, node: fx.Node):
        """Stands for a call that is not looked into: fresh values of the captured shapes, no operations."""
        self.opaque.append(node)
        example = tree_map(_fresh, graph.value(node))
        if not any(isinstance(leaf, torch.Tensor | torch.SymInt) for leaf in tree_leaves(example)):
            return example
        tracer = _tracer()
        proxy = tracer.create_proxy("call_function", opaque_call, (), {})
        return track_tensor_tree(example, proxy, constant=None, tracer=tracer)


def held_tensor():
    """Target of shadow nodes that stand for tensors that the captured graph holds itself."""


def opaque_call():
    """Target of shadow nodes that stand for calls that are not looked into."""


def _fresh(leaf):
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return leaf


def _tracer():
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY).tracer


def _nodes_after(graph_: fx.Graph, before: fx.Node | None) -> list[fx.Node]:
    created = []
    for node in reversed(graph_.nodes):
        if node is before:
            break
        created.append(node)
    return created[::-1]


def _proxy_name(leaf, tracer) -> str | None:
    """Name of the shadow node that computes a traced value, or None (constants, plain numbers)."""
    if isinstance(leaf, torch.Tensor):
        slot = get_proxy_slot(leaf, tracer, None)
        return None if slot is None else slot.proxy.node.name
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        slot = get_proxy_slot(leaf, tracer, None)
        return None if slot is None else slot.force().node.name
    return None


def _autocast(device: str, dtype: torch.dtype | None, enabled: bool) -> torch.autocast:
    # pre-dispatch tracing records an autocast region without entering it, which gives wrong dtypes
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def _fake_mode(module: fx.GraphModule) -> FakeTensorMode | None:
    for node in module.graph.nodes:
        for leaf in tree_leaves(graph.value(node)):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def fill_in_examples(
    module: fx.GraphModule, nodes: Iterable[fx.Node], ambient: Ambient = NOTHING_AROUND, strict: bool = False
) -> None:
    """Give new calls, in their order, their example values, under the name that the graph has for them.

    AOTAutograd caches no graph where one is missing, and an exported graph is not valid. `strict`: what a call raises
    is raised.
    """
    name = "val" if any("val" in node.meta for node in module.graph.nodes) else "example_value"
    with _undisturbed(_fake_mode(module), ambient):
        for node in nodes:
            if name in node.meta or not all(name in read.meta for read in node.all_input_nodes):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), graph.value)
            call = getattr(args[0], node.target) if node.op == "call_method" else node.target
            try:
                node.meta[name] = call(*args[node.op == "call_method" :], **kwargs)
            except Exception as problem:
                if strict:
                    raise
                log.debug("no example value for %s: %s", node.name, problem)


@contextlib.contextmanager
def _undisturbed(fake_mode: FakeTensorMode | None, ambient: Ambient):
    """Tracing must not add guards, consume random numbers, or leave a changed grad mode or tracing context."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        gradients = torch.is_grad_enabled() if ambient.gradients is None else ambient.gradients
        stack.enter_context(torch.set_grad_enabled(gradients))
        for region in ambient.autocasts:
            stack.enter_context(_autocast(*region))
        if fake_mode is None:
            yield
            return
        stack.enter_context(fake_mode)
        if fake_mode.shape_env is not None:
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(fake_mode.shape_env.suppress_guards())
        context = TracingContext.try_get()
        if context is not None:
            previous = context.fake_mode
            context.fake_mode = fake_mode
            stack.callback(setattr, context, "fake_mode", previous)
        yield
