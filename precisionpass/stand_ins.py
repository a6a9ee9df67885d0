"""What answers in place of a captured graph in a dry run, so that the call goes on and captures the next graph."""

from collections.abc import Callable

import sympy
import torch
from torch import fx

from precisionpass import graph


def stand_ins(module: fx.GraphModule) -> Callable[..., tuple]:
    """What answers in place of a captured graph: inputs as they are, whole numbers, masks and what else no parameter
    goes into computed (sizes and branches further on may depend on them), zeros for everything else.
    """
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    outputs, examples = _outputs(module), [graph.value(n) for n in module.graph.nodes if n.op == "placeholder"]
    learned = _learned(module)
    exact = [o for o in outputs if isinstance(o, fx.Node) and o.op != "placeholder" and _is_exact(o, learned)]
    compute = _only(module, exact)

    def answer(*actual) -> tuple:
        today = _sizes_today(examples, actual)
        try:
            with torch.no_grad():
                computed = dict(zip(exact, compute(*actual), strict=True)) if exact else {}
        except RuntimeError:
            computed = {}
        computed = {n: value.detach().requires_grad_(graph.value(n).requires_grad) for n, value in computed.items()}
        values = dict(zip(inputs, actual, strict=True)) | computed
        return tuple(values[o] if o in values else _zeros(o, today) if isinstance(o, fx.Node) else o for o in outputs)

    return answer


def _outputs(module: fx.GraphModule) -> list:
    return list(next(n for n in module.graph.nodes if n.op == "output").args[0])


def _is_exact(output: fx.Node, learned: set[fx.Node]) -> bool:
    value = graph.value(output)
    whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex
    return whole or (isinstance(value, torch.Tensor) and output not in learned)


_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "linear", "conv", "attention", "softmax", "norm")


def _learned(module: fx.GraphModule) -> set[fx.Node]:
    """The nodes that parameters go into, or products and norms: not worth computing for the sizes that they hold."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        product = node.op in ("call_function", "call_method") and any(word in name for word in _PRODUCTS)
        held = node.op in ("get_attr", "call_module") or isinstance(graph.value(node), torch.nn.Parameter)
        if product or held or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _only(module: fx.GraphModule, wanted: list[fx.Node]) -> fx.GraphModule:
    """A copy of a graph that computes these nodes and nothing else."""
    needed = set(wanted)
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    copied, images = fx.Graph(), {}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            images[node] = copied.node_copy(node, images.__getitem__)
    copied.output(tuple(images[node] for node in wanted))
    return fx.GraphModule(module, copied)


def _sizes_today(examples: list, actual: tuple) -> dict:
    """The symbols of the captured inputs with the sizes of this call's."""
    known = {}
    for example, value in zip(examples, actual, strict=True):
        pairs = [(example, value)] if isinstance(example, torch.SymInt) else []
        if isinstance(example, torch.Tensor) and isinstance(value, torch.Tensor):
            pairs = list(zip(example.shape, value.shape, strict=True))
        known |= {graph.expression(e): v for e, v in pairs if isinstance(e, torch.SymInt)}
    return known


def _zeros(output: fx.Node, today: dict):
    def size(s) -> int:
        known = graph.expression(s)
        known = known.xreplace(today) if isinstance(known, sympy.Basic) else known
        return int(known) if isinstance(known, int) or known.is_number else graph.hint(s)

    value = graph.value(output)
    if not isinstance(value, torch.Tensor):
        return size(value) if isinstance(value, torch.SymInt) else value
    zeros = torch.zeros([size(s) for s in value.shape], dtype=value.dtype, device=value.device)
    return zeros.requires_grad_(value.requires_grad)
