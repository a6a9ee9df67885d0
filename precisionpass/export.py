"""Programs of torch.export: the pass over their graph, in ATen alone, and a new valid program around it."""

import copy

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.ops import aten  # pyright: ignore[reportMissingImports]

from precisionpass.backend import Backend
from precisionpass.errors import PrecisionPassError

# What the rewrite writes, as an exported graph has it: it holds no methods and no functions of torch.
_AS_ATEN = {
    "contiguous": aten.contiguous.default,
    "expand": aten.expand.default,
    "flatten": aten.flatten.using_ints,
    "movedim": aten.movedim.int,
    "permute": aten.permute.default,
    "squeeze": aten.squeeze.dim,
    "to": aten.to.dtype,
    "unflatten": aten.unflatten.int,
    "unsqueeze": aten.unsqueeze.default,
    torch.full: aten.full.default,
    torch.logical_and: aten.logical_and.default,
    torch.logical_not: aten.logical_not.default,
    torch.mul: aten.mul.Tensor,
    torch.randint: aten.randint.low,
}


def rewritten(program: ExportedProgram, backend: Backend) -> ExportedProgram:
    """The program with its sites rewritten as the backend's rules say; the backend has the report. `program` stays.

    Nothing checks an exported program's sizes later, so a `where:` on a dynamic size counts only where it holds for
    every size. Raises PrecisionPassError.
    """
    if not isinstance(program, ExportedProgram):
        raise PrecisionPassError("this is no torch.export.ExportedProgram", where="precisionpass.rewrite",
                                 why=f"it is a {type(program).__name__}", code="PP409",
                                 fix="pass torch.export.export(model, args), or use precisionpass.compile")  # fmt: skip
    module = copy.deepcopy(program.graph_module)
    signature, calls = copy.deepcopy((program.graph_signature, program.module_call_graph))
    _mark_inputs(module, program)
    backend.look(module, training=_trains(module), guarded=False)
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            _to_aten(child)
    names = dict(zip(_names(program.graph_module), _names(module), strict=True))
    entries = [entry.signature for entry in calls if entry.signature is not None]
    arguments = [spec.arg for spec in (*signature.input_specs, *signature.output_specs)]
    for argument in (*arguments, *(a for entry in entries for a in (*entry.inputs, *entry.outputs))):
        if argument.name in names:
            argument.name = names[argument.name]
    return ExportedProgram(
        root=module, graph=module.graph, graph_signature=signature, state_dict=program.state_dict,
        range_constraints=program.range_constraints, module_call_graph=calls,
        example_inputs=program.example_inputs, constants=program.constants, verifiers=program.verifiers,
    )  # fmt: skip


def _mark_inputs(module: fx.GraphModule, program: ExportedProgram) -> None:
    """Tell the shadow which inputs are parameters and which are numbers that the model holds."""
    inputs = (node for node in module.graph.nodes if node.op == "placeholder")
    for node, spec in zip(inputs, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER:
            node.meta["parameter"] = spec.target
        held = program.constants.get(spec.target) if spec.kind is InputKind.CONSTANT_TENSOR else None
        if isinstance(held, torch.Tensor) and held.dim() == 0 and held.device.type != "meta":
            node.meta["constant"] = held.item()


def _trains(module: fx.GraphModule) -> bool:
    """Exported in training mode: a dropout or a batch norm says so."""
    calls = [node for node in module.graph.nodes if node.target in (aten.dropout.default, aten.batch_norm.default)]
    return any(node.args[2 if node.target is aten.dropout.default else 5] is True for node in calls)


def _names(module: fx.GraphModule) -> list:
    """The names of inputs and outputs, in order: copying a graph may change the one, rewriting the other."""
    nodes = list(module.graph.nodes)
    return [node.name for node in nodes if node.op == "placeholder"] + [
        getattr(value, "name", None) for value in nodes[-1].args[0]
    ]


def _to_aten(module: fx.GraphModule) -> None:
    """The calls that the rewrite wrote as Dynamo has them, as ATen overloads."""
    for node in module.graph.nodes:
        if node.op in ("call_method", "call_function") and node.target in _AS_ATEN:
            node.op, node.target = "call_function", _AS_ATEN[node.target]
    module.recompile()
