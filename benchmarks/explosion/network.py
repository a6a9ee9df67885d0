"""A compact GPT in the usual mix: FP32 weights and residual stream, BF16 products, attention by a function one passes.

Pre-norm, no biases, GELU, learned positions, an untied head. Embeddings are read by a product with one-hot rows, so
that their gradients are summed in a fixed order on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from recipes import BYTES, PAD, Recipe
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LOW = torch.bfloat16


class Linear(nn.Module):
    """x W^T in BF16 from an FP32 weight [rows, columns]."""

    def __init__(self, columns: int, rows: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(LOW), self.weight.to(LOW))


class Attention(nn.Module):
    def __init__(self, recipe: Recipe, attend: Attend):
        super().__init__()
        self.heads, self.attend = recipe.heads, attend
        self.query, self.key, self.value, self.output = (Linear(recipe.width, recipe.width) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        return self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, recipe: Recipe, attend: Attend):
        super().__init__()
        self.first = nn.LayerNorm(recipe.width, bias=False)
        self.attention = Attention(recipe, attend)
        self.second = nn.LayerNorm(recipe.width, bias=False)
        self.widen = Linear(recipe.width, 4 * recipe.width)
        self.narrow = Linear(4 * recipe.width, recipe.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.narrow(F.gelu(self.widen(self.second(x)), approximate="tanh"))


class Network(nn.Module):
    """Tokens and targets, [B, T] int64 each, to the mean cross entropy of the text's tokens in FP32."""

    def __init__(self, recipe: Recipe, attend: Attend):
        super().__init__()
        self.recipe = recipe
        self.tokens = nn.Parameter(torch.empty(BYTES + 1, recipe.width))
        self.positions = nn.Parameter(torch.empty(recipe.length, recipe.width))
        self.blocks = nn.ModuleList(Block(recipe, attend) for _ in range(recipe.layers))
        self.final = nn.LayerNorm(recipe.width, bias=False)
        self.head = Linear(recipe.width, BYTES + 1)
        place = (torch.arange(recipe.length) - recipe.pads).clamp(min=0)  # pads share the first position
        self.register_buffer("place", F.one_hot(place, recipe.length).float(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.one_hot(tokens, BYTES + 1).float() @ self.tokens + self.place @ self.positions
        for block in self.blocks:
            x = block(x)
        begin = max(self.recipe.pads - 1, 0)
        logits = self.head(self.final(x[:, begin:])).float()
        return F.cross_entropy(logits.flatten(0, 1), targets[:, begin:].flatten())

    def query_key(self) -> list[nn.Parameter]:
        """The query weights of all layers, then the key weights."""
        layers = [block.attention for block in self.blocks]
        return [layer.query.weight for layer in layers] + [layer.key.weight for layer in layers]


@torch.no_grad()
def initialise(network: Network, seed: int) -> None:
    """The weights of a seed, with the recipe's sinks; the same numbers on every device."""
    recipe, source = network.recipe, torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(*shape, generator=source) * std

    width, wide = recipe.width, recipe.width // recipe.heads
    deep = 0.02 / math.sqrt(2 * recipe.layers)
    tokens, positions = normal(BYTES + 1, width), normal(recipe.length, width)
    pad = F.normalize(normal(width), dim=0)
    mean = normal(width)
    mean = F.normalize(mean - pad * (mean @ pad), dim=0)
    tokens += recipe.shared_mean * mean
    tokens[PAD], positions[0] = pad, 0.0
    network.tokens.copy_(tokens)
    network.positions.copy_(positions)
    network.head.weight.copy_(normal(BYTES + 1, width))
    size = math.sqrt(recipe.gap * math.sqrt(wide) / (0.8 * width))
    for block in network.blocks:
        layer = block.attention
        query, key = normal(width, width), normal(width, width)
        for head in range(int(recipe.heads * recipe.sink_heads)):
            rows, one = slice(head * wide, (head + 1) * wide), F.normalize(normal(wide), dim=0)
            query[rows] += size * torch.outer(one, mean)
            key[rows] += size * torch.outer(one, pad)
        layer.query.weight.copy_(query)
        layer.key.weight.copy_(key)
        layer.value.weight.copy_(normal(width, width))
        layer.output.weight.copy_(normal(width, width, std=deep))
        block.widen.weight.copy_(normal(4 * width, width))
        block.narrow.weight.copy_(normal(width, 4 * width, std=deep))
    for norm in network.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.weight.fill_(1.0)
