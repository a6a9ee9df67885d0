"""A model of which nearly everything is almost a site."""

import torch
from torch import nn
from torch.nn import functional


class TalkingHeads(nn.Module):
    """Attention whose probabilities are mixed over the heads before they meet V."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)
        self.mix = nn.Parameter(torch.eye(heads))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        probabilities = (q @ k.mT * 0.25).softmax(-1)
        return (torch.einsum("bhij,hg->bgij", probabilities, self.mix) @ v).transpose(1, 2).flatten(2)


class SlotAttention(nn.Module):
    """The softmax runs over the queries."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-2) @ v


class StandardScore(nn.Module):
    """Not a layer norm: n - 1, and eps outside the root."""

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


class NearMisses(nn.Module):
    """Two layers of near misses, one attention that is one, and a row divided by its length."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": StandardScore(), "talking": TalkingHeads(width, 4), "slots": SlotAttention(width)})
            for _ in range(2)
        )
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["talking"](layer["norm"](x))
            x = x + layer["slots"](x)
        q, k, v = self.qkv(x).chunk(3, -1)
        return functional.normalize(functional.scaled_dot_product_attention(q, k, v), dim=-1)
