"""The recipes of training runs that separate attention arithmetics: nothing but data, and the text they train on.

Every sequence begins with a few identical, unmasked pads whose keys are tied, and the query and key weights start with
a rank-one term that lets every text token attend to them: a saturated attention sink. That is the state in which the
gradient's remaining force is smaller than the rounding of a low-precision attention.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BYTES = 128
PAD = BYTES


@dataclass(frozen=True)
class Recipe:
    """A model, its sinks and its optimizer.

    gap: how far a pad's logit stands above a text key's at the start. sink_heads: share of the heads that have it.
    trained: "all" weights, the "query_key" weights alone, or all but the sinks' ("others"). clip: the largest norm of
    the gradient, 0 for none. start: the recipe that the weights come from; then the sinks are put in by pretraining.py.
    swapped: upper and lower case exchanged in the text, so that a trained model has something to learn.
    """

    steps: int
    gap: float
    eps: float
    trained: str = "all"
    rate: float = 1e-3
    warm_up: int = 100
    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    sequences: int = 32
    pads: int = 3
    sink_heads: float = 1.0
    shared_mean: float = 0.5
    clip: float = 0.0
    start: str = ""
    swapped: bool = False
    betas: tuple[float, float] = (0.9, 0.95)


SMALL = {"layers": 2, "width": 64, "heads": 2, "length": 64, "sequences": 8, "warm_up": 20}

RECIPES = {  # "scratch" and "frozen" from random weights, "fine-tune" from trained ones; "-small" for a CPU
    "scratch": Recipe(steps=1200, gap=18.0, eps=1e-12),
    "frozen": Recipe(steps=1000, gap=20.0, eps=1e-8, trained="query_key", warm_up=10),
    "pretraining": Recipe(steps=1500, gap=20.0, eps=1e-8, trained="others", sink_heads=0.5, clip=1.0),
    "fine-tune": Recipe(
        steps=800,
        gap=17.0,
        eps=1e-8,
        rate=3e-3,
        trained="query_key",
        warm_up=10,
        sink_heads=0.5,
        start="pretraining",
        swapped=True,
    ),
    "scratch-small": Recipe(steps=240, gap=18.0, eps=1e-12, **SMALL),
    "frozen-small": Recipe(steps=200, gap=20.0, eps=1e-8, trained="query_key", sink_heads=0.5, **SMALL),
}


def text(size: int = 8_000_000, swapped: bool = False) -> Tensor:
    """The first bytes of the Python standard library's own sources, [size] int64, each below BYTES."""
    found = bytearray()
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-r]*/*.py")):
        found += file.read_bytes()
        if len(found) >= size:
            break
    if swapped:
        found = found.swapcase()
    return torch.frombuffer(found[:size], dtype=torch.uint8).clamp(max=BYTES - 1).long()


def places(recipe: Recipe, size: int, seed: int) -> Tensor:
    """Where in a text of `size` bytes each sequence of each step begins, [steps, sequences] int64."""
    source = torch.Generator().manual_seed(1234 + seed)
    return torch.randint(0, size - recipe.length - 1, (recipe.steps, recipe.sequences), generator=source)


def batch(recipe: Recipe, corpus: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens to predict, [sequences, length] each: the pads, then text; the last pad predicts it."""
    count = recipe.length - recipe.pads
    piece = corpus[begin[:, None] + torch.arange(count + 1, device=corpus.device)]
    pads = piece.new_full((len(begin), recipe.pads), PAD)
    tokens = torch.cat([pads, piece[:, :-1]], 1)
    return tokens, torch.cat([tokens[:, 1:], piece[:, -1:]], 1)
