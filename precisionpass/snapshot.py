"""A captured graph as it was before a rewrite, to go back to when one fails.

Private torch API used here: the `_dynamo_source` that Dynamo hangs on placeholders and AOTAutograd asks for.
`tests/test_capture.py` says so first when a new torch moves it.
"""

import copy
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Snapshot:
    """The graph of `module`, remembered."""

    module: fx.GraphModule
    graph: fx.Graph

    def restore(self) -> None:
        self.module.graph = self.graph


def snapshot(module: fx.GraphModule) -> Snapshot:
    """Remember the graph of `module`, the marks that a plain copy loses included."""
    kept = copy.deepcopy(module.graph)
    for node, twin in zip(module.graph.nodes, kept.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    return Snapshot(module, kept)
