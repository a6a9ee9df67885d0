"""A small trained checkpoint with saturated sinks put into it: where the recipe "fine-tune" starts.

The network is trained on plain text in FP32 attention, with its sinks' weights held. Then half of the heads of every
layer get query and key weights of rank one, by least squares over the hidden states that the layer really sees: every
text token's query finds the pads' keys `gap` above all others.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from network import Network
from recipes import RECIPES, Recipe, batch
from torch import Tensor
from training import Trainer

SEED = 7


def checkpoint(recipe: Recipe, corpus: Tensor, folder: Path, backend: str) -> dict[str, Tensor]:
    """The weights that `recipe` starts from; made once, then read from `folder`."""
    file = folder / "start.pt"
    if not file.exists():
        trainer = Trainer(RECIPES[recipe.start], "float32", corpus, backend)
        record = trainer.run(0, folder)
        print(f"pretrained to a loss of {record['loss'][-1]:.3f}", flush=True)
        install(trainer.oracle, recipe, corpus)
        torch.save(trainer.oracle.state_dict(), file)
    return torch.load(file, map_location=corpus.device, weights_only=True)


@torch.no_grad()
def install(network: Network, recipe: Recipe, corpus: Tensor) -> None:
    """Put the sinks into the network, layer by layer, each for what reaches it through the layers before."""
    source = torch.Generator().manual_seed(SEED)
    begin = torch.randint(0, len(corpus) - recipe.length - 1, (recipe.sequences,), generator=source)
    tokens, targets = batch(recipe, corpus, begin.to(corpus.device))
    wide = recipe.width // recipe.heads
    size = math.sqrt(recipe.gap * math.sqrt(wide))
    for block in network.blocks:
        query, key = probes(seen(network, block.attention, tokens, targets), recipe.pads)
        for head in range(int(recipe.heads * recipe.sink_heads)):
            rows = slice(head * wide, (head + 1) * wide)
            one = F.normalize(torch.randn(wide, generator=source), dim=0).to(query.device)
            block.attention.query.weight[rows] = size * torch.outer(one, query)
            block.attention.key.weight[rows] = size * torch.outer(one, key)


def seen(network: Network, layer, tokens: Tensor, targets: Tensor) -> Tensor:
    """What a layer of the network is given, [B, T, width] FP32."""
    found: list[Tensor] = []
    watch = layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    network(tokens, targets)
    watch.remove()
    return found[0]


def probes(hidden: Tensor, pads: int) -> tuple[Tensor, Tensor]:
    """(query, key), [width] each: query . x is about 1 for text; key . x is about 1 for the pads and 0 for text."""
    texts = hidden[:, pads:].flatten(0, 1)
    mean, pad = texts.mean(0), hidden[:, :pads].flatten(0, 1).mean(0)
    spread = (texts - mean).T @ (texts - mean) / len(texts)
    spread += 0.3 * spread.trace() / len(mean) * torch.eye(len(mean), device=mean.device)
    query = torch.linalg.solve(spread, mean)
    query = query / (query @ mean)
    apart = pad - mean
    key = torch.linalg.solve(spread, apart)
    key = key / (key @ apart)
    key = key - query * (key @ mean)
    return query, key / (key @ apart)
