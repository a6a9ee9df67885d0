"""A captured graph as a Python file that runs alone: every call with its dtype, shape, module and line of the user."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from precisionpass import graph
from precisionpass.capture import Captured
from precisionpass.origin import user_line
from precisionpass.review.plain import shown
from precisionpass.review.spelling import Speller, Unwritable, readable, type_of

LONGEST_LITERAL = 64  # elements of a constant that is written out; a larger one becomes an input


@dataclass(frozen=True)
class View:
    """A graph to be written: the captured one, or an older state of it. children: attribute -> the child's view."""

    captured: Captured
    graph: fx.Graph
    children: Mapping[str, "View"]


def file_of(view: View, moment: str) -> str:
    """The whole file: child graphs as functions, the graph as `graph(...)`, `inputs()` of the captured shapes.

    moment: "before" or "after". What calls something that no file can name says so and does not run.
    """
    needs = _Needs()
    functions = _functions(view, "graph", needs)
    unable = [f"# It cannot be run: it calls {name}, which no file can name." for name in dict.fromkeys(needs.missing)]
    title = f"Graph {view.captured.name} {moment} the rewrite, as torch captured it."
    lines = [
        f'"""{title} Run it to compute it on made-up inputs."""',
        *unable,
        *sorted(needs.warnings),
        "",
        *import_lines(needs.imports),
        "from precisionpass.measure import made_up, show",
        *functions,
        "",
        "",
        "def inputs():",
        '    """Made-up values of the captured types, sizes as they were that day."""',
        "    return (",
        *(f"        {made_up(node)},  # {name}" for node, name in _parameters(view)),
        "    )",
        "",
        "",
        'if __name__ == "__main__":',
        "    show(graph(*inputs()))",
    ]
    return "\n".join(lines) + "\n"


def made_up(node: fx.Node, device: torch.device | None = None) -> str:
    """The expression for a made-up value of what a node computes, on its own device or on this one."""
    held = graph.value(node)
    if not isinstance(held, torch.Tensor):
        return repr(graph.hint(held)) if isinstance(held, int | float | torch.SymInt) else "None"
    device = device or held.device
    where = "" if device.type == "cpu" else f', "{device}"'
    return f"made_up({tuple(graph.hint(size) for size in held.shape)}, {held.dtype}{where})"


def names_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """A Python name for every node: placeholders in a person's words, calls by torch's, each once."""
    nodes = list(nodes)
    names: dict[fx.Node, str] = {}
    taken = {node.name for node in nodes if node.op != "placeholder"}
    for node in nodes:
        if node.op == "placeholder":
            name = readable(str(node.target))
            names[node] = f"{name}_given" if name in taken else name
            names[node] = node.name if names[node] in taken else names[node]
            taken.add(names[node])
        else:
            names[node] = node.name
    return names


def import_lines(imports: Iterable[str]) -> list[str]:
    """The imports of a file, torch among them, and an empty line."""
    own = [f"import {name}" for name in sorted(imports) if name.startswith("precisionpass")]
    others = [f"import {name}" for name in sorted({"torch", *imports}) if not name.startswith("precisionpass")]
    return [*others, "", *own]


def body(
    nodes: Iterable[fx.Node], speller: Speller, place: Callable[[fx.Node], str] = lambda node: ""
) -> tuple[list[str], list[str]]:
    """Lines `name = call  # type` under the places they come from, and what could not be written."""
    lines, missing, last = [], [], ""
    for node in nodes:
        try:
            text = speller.call(node)
        except Unwritable as problem:
            missing.append(str(problem))
            text = f"NotImplemented  # {problem}"
        if (where := place(node)) != last:
            lines += [f"# {where}"] if where else []
            last = where
        kind = type_of(node)
        lines.append(f"{speller.names[node]} = {text}" + (f"  # {kind}" if kind else ""))
    return lines, missing


def places_in(captured: Captured) -> Callable[[fx.Node], str]:
    """Says for a node "transformer.h.0.attn (GPT2Attention), modeling_gpt2.py:64: the line itself"."""
    known: dict[tuple, str] = {}

    def place(node: fx.Node) -> str:
        stack, trace = node.meta.get("nn_module_stack"), node.meta.get("stack_trace") or ""
        key = (*(stack or ())[-1:], trace) if isinstance(stack, tuple) else (*list(stack or ())[-1:], trace)
        if key not in known:
            known[key] = _place(captured, node, trace, bool(stack))
        return known[key]

    return place


def _place(captured: Captured, node: fx.Node, trace: str, in_module: bool) -> str:
    source, text = user_line(trace)
    line = f"{shown(source)}: {shown(text)}" if text else shown(source)
    if not in_module:
        return line
    origin = captured.origin([node])
    module = shown(origin.module) or "(the model itself)"
    return ", ".join(part for part in (f"{module} ({shown(origin.module_class)})", line) if part)


@dataclass
class _Needs:
    """What a file's functions need from outside, and the names of the children written so far, by their view's id."""

    missing: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    warnings: set[str] = field(default_factory=set)
    written: dict[int, str] = field(default_factory=dict)


def _functions(view: View, name: str, needs: _Needs) -> list[str]:
    """The graph as a function called `name`, after the functions of its children."""
    lines: list[str] = []
    names = names_of(view.graph.nodes)
    for node in view.graph.nodes:
        child = view.children.get(str(node.target)) if node.op == "get_attr" else None
        if child is None:
            continue
        if id(child) not in needs.written:
            needs.written[id(child)] = f"{'' if name == 'graph' else name + '_'}{str(node.target).replace('.', '_')}"
            lines += _functions(child, needs.written[id(child)], needs)
        names[node] = needs.written[id(child)]
    constants = {node: text for node in view.graph.nodes if (text := _constant(view, node))}
    needs.missing += [
        f"the attribute {shown(node.target)}"
        for node in view.graph.nodes
        if node.op == "get_attr" and not graph.is_tensor(node) and str(node.target) not in view.children
    ]
    calls = [node for node in view.graph.nodes if node.op.startswith("call_")]
    speller = Speller(names)
    inside, unwritten = body(calls, speller, places_in(view.captured))
    needs.missing += unwritten
    result = speller.value(next(node for node in view.graph.nodes if node.op == "output").args[0])
    lines += ["", "", f"def {name}("]
    lines += [f"    {parameter},  # {type_of(node)}" for node, parameter in _parameters(view)]
    lines += ["):"]
    lines += [f"    {names[node]} = {text}" for node, text in constants.items()]
    lines += [f"    {line}" for line in inside]
    lines += [f"    return {result}"]
    needs.imports |= speller.imports
    needs.warnings |= set(speller.warnings)
    return lines


def _parameters(view: View) -> list[tuple[fx.Node, str]]:
    """What the function takes: the graph's inputs, then the tensors that it holds and that are not written out."""
    names = names_of(view.graph.nodes)
    held = [n for n in view.graph.nodes if n.op == "get_attr" and graph.is_tensor(n) and not _constant(view, n)]
    return [(n, names[n]) for n in [*(n for n in view.graph.nodes if n.op == "placeholder"), *held]]


def _constant(view: View, node: fx.Node) -> str:
    """A small tensor that the graph holds, as code; "" for anything else."""
    if node.op != "get_attr" or str(node.target) in view.children:
        return ""
    held: Any = view.captured.module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    plain = type(held) is torch.Tensor and not held.is_meta and not held.requires_grad
    if not plain or held.numel() > LONGEST_LITERAL:
        return ""
    return f"torch.tensor({Speller({}).value(held.tolist())}, dtype={held.dtype})"
