"""A file of some twenty lines for one rewritten site: the site alone, old and new, against float64."""

from collections.abc import Sequence

import torch
from torch import fx

from precisionpass import graph
from precisionpass.review.code import body, import_lines, made_up, names_of
from precisionpass.review.plain import shown
from precisionpass.review.report import SiteRecord
from precisionpass.review.slices import Piece, autocast_around
from precisionpass.review.spelling import Speller


def repro(record: SiteRecord, whole: fx.Graph, old: Piece, new: Piece) -> str:
    """The file's text, "" where a call of the site cannot be written. whole: the graph that `old` is a piece of."""
    inputs = {node.name: node for node in (*new.inputs, *old.inputs)}
    names = {node.name: name for node, name in names_of([*inputs.values(), *old.calls, *new.calls]).items()}
    parameters = [names[name] for name in inputs]
    around = list(autocast_around(whole, old.calls[-1]))
    # What was looked at on the meta device runs on the CPU.
    device = torch.device("cpu") if any(map(_on_meta, inputs.values())) else None
    speller = Speller({n: names[n.name] for p in (old, new) for n in (*p.inputs, *p.calls)}, device)
    functions: list[str] = []
    for name, piece in (("old", old), ("new", new)):
        lines = _function(name, piece, parameters, around, speller)
        if not lines:
            return ""
        functions += lines
    module = f"{shown(record.module) or 'the model itself'} ({shown(record.module_class) or 'no module'})"
    where = ", ".join(part for part in (module, shown(record.source)) if part)
    lines = [
        f'"""{_quoted(shown(record.kind))} of {_quoted(where)}, rewritten by rule {_quoted(shown(record.rule))}.',
        "",
        "Run it: the site alone, old and new, against float64, on made-up inputs of the captured shapes.",
        '"""',
        *speller.warnings,
        "",
        *import_lines(speller.imports),
        "from precisionpass.measure import made_up, show_comparison",
        *functions,
        "",
        "",
        "def inputs():",
        "    return {",
        *(f'        "{names[name]}": {made_up(node, device)},' for name, node in inputs.items()),
        "    }",
        "",
        "",
        'if __name__ == "__main__":',
        "    show_comparison(old, new, inputs())",
    ]
    return "\n".join(lines) + "\n"


def _on_meta(node: fx.Node) -> bool:
    value = graph.value(node)
    return isinstance(value, torch.Tensor) and value.is_meta


def _function(name: str, piece: Piece, parameters: Sequence[str], around: Sequence[str], speller: Speller) -> list[str]:
    """`def name(...)` for a piece, [] where it cannot be written."""
    inside, missing = body(piece.calls, speller)
    if missing or not piece.calls:
        return []
    results = ", ".join(speller.names[node] for node in piece.outputs)
    indent = "    " * (len(around) + 1)
    regions = [f"{'    ' * (depth + 1)}with {region}:" for depth, region in enumerate(around)]
    head = f"def {name}({', '.join(parameters)}):"
    return ["", "", head, *regions, *(indent + line for line in inside), f"{indent}return {results}"]


def _quoted(text: str) -> str:
    """Text as it may stand inside a docstring."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
