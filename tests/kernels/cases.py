"""Attentions that every kernel test runs, by name: each says what is special, the rest is small and ordinary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precisionpass.ops.arguments import AttentionArguments

Random = Callable[..., Tensor]
MINIMUM = torch.finfo(torch.float32).min
MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Case:
    """Shapes, and tensors made from a source of normal numbers; `settings` go to the op as they are."""

    batch: int = 1
    heads: int = 2
    key_heads: int | None = None
    rows: int = 70
    keys: int = 70
    width: int = 32
    value_width: int | None = None
    size: float = 1.0
    lse_gradient: bool = False
    tensors: dict[str, Callable[[Random], Tensor]] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)

    def build(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> AttentionArguments:
        """The arguments, q and v as a model hands them over ([B, S, H, W] transposed), k contiguous."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        key_heads, value_width = self.key_heads or self.heads, self.value_width or self.width
        q = self.size * random(self.batch, self.rows, self.heads, self.width).transpose(1, 2)
        k = self.size * random(self.batch, key_heads, self.keys, self.width)
        v = random(self.batch, self.keys, key_heads, value_width).transpose(1, 2)
        q, k, v = (tensor.to(device=device, dtype=dtype) for tensor in (q, k, v))
        settings = {"scale": self.width**-0.5, "save_residual": True, "return_max_logits": True} | self.settings
        if settings.get("dropout_p"):
            settings["seed"] = torch.tensor([1234567890123], device=device)
        tensors = {name: make(random).to(device) for name, make in self.tensors.items()}
        return AttentionArguments(q, k, v, **tensors, **settings)

    def upstream(self, arguments: AttentionArguments, seed: int = 1) -> tuple[Tensor, Tensor | None]:
        """Gradients of output and lse (None unless the case has one)."""
        generator = torch.Generator().manual_seed(seed)
        q, v = arguments.q, arguments.v
        output = torch.randn(*q.shape[:2], q.shape[2], v.shape[3], generator=generator).to(q)
        lse = torch.randn(q.shape[:3], generator=generator).to(q.device) if self.lse_gradient else None
        return output, lse


def _case(tensors: dict[str, Callable[[Random], Tensor]] | None = None, **values: object) -> Case:
    shapes = {name: values.pop(name) for name in list(values) if name in Case.__dataclass_fields__}
    return Case(**shapes, tensors=tensors or {}, settings=values)


def _first_rows_filled(value: float) -> Callable[[Random], Tensor]:
    return lambda random: torch.where(torch.arange(70)[:, None] < 5, value, 0.0).expand(1, 1, 70, 70)


def _documents(rows: int, keys: int) -> Callable[[Random], Tensor]:
    """Rows and keys of one document see one another: blocks that hold everything, something and nothing."""

    def make(random: Random) -> Tensor:
        ends = (random(2, 3).abs() * rows / 2).long().clamp(max=rows - 1)
        starts = torch.zeros(2, rows, dtype=torch.long).scatter_(1, ends, 1).cumsum(1)
        number = torch.arange(keys) * rows // keys
        return starts[:, None, :, None] == starts.gather(1, number.expand(2, keys))[:, None, None, :]

    return make


def _padded_causal(rows: int, keys: int, left: int) -> Callable[[Random], Tensor]:
    """Causal with `left` keys of padding: the first rows see nothing."""
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows)
    return lambda random: (seen & (torch.arange(keys) >= left))[None, None]


def _holes(random: Random) -> Tensor:
    """Whole blocks of 64 without a key, or with every key, between others."""
    coarse = random(1, 1, 5, 4) > -0.3
    fine = coarse.repeat_interleave(64, 2).repeat_interleave(64, 3)
    return fine & (random(1, 1, 320, 256) > -4)


CASES = {
    "plain": _case(),
    "causal": _case(causal="top_left"),
    "causal, tiles and a tail": _case(causal="top_left", rows=300, keys=300, width=64),
    "bottom_right, more keys": _case(causal="bottom_right", rows=40, keys=100),
    "bottom_right, more rows": _case(causal="bottom_right", rows=100, keys=40),
    "bottom_right, more rows, nan": _case(causal="bottom_right", rows=100, keys=40, dead_rows="nan"),
    "top_left, more keys": _case(causal="top_left", rows=40, keys=100),
    "top_left, more rows": _case(causal="top_left", rows=150, keys=70),
    "grouped": _case(heads=6, key_heads=2, causal="top_left"),
    "multi-query": _case(heads=3, key_heads=1),
    "window": _case(causal="top_left", window_left=20, rows=200, keys=200),
    "window, two sides": _case(window_left=5, window_right=17, rows=200, keys=200),
    "window, bottom_right": _case(window_left=30, causal="bottom_right", rows=70, keys=200),
    "odd widths": _case(width=20, value_width=37),
    "narrow values": _case(width=64, value_width=16),
    "wide, grouped": _case(batch=2, heads=16, key_heads=2, width=256, causal="top_left", rows=80, keys=80),
    "latent, 192 and 128": _case(width=192, value_width=128, causal="top_left", rows=90, keys=90),
    "value 96, key 128": _case(width=128, value_width=96),
    "bias": _case({"bias": lambda random: random(1, 2, 70, 70)}),
    "bias, causal": _case({"bias": lambda random: random(1, 2, 70, 70)}, causal="top_left"),
    "bias by key": _case({"bias": lambda random: random(1, 2, 1, 70)}, batch=3),
    "bias by row": _case({"bias": lambda random: random(2, 1, 70, 1)}, batch=2),
    "bias by head": _case({"bias": lambda random: random(1, 2, 1, 1)}),
    "bias, one column left": _case(
        {"bias": lambda random: torch.where(random(1, 1, 70, 70) > 0.5, MINUS_INFINITY, 0.0)}
    ),
    "bias, rows of finfo.min": _case({"bias": _first_rows_filled(MINIMUM)}),
    "bias, rows of -1e4": _case({"bias": _first_rows_filled(-1e4)}),
    "mask": _case({"mask": lambda random: random(1, 2, 70, 70) > 0}),
    "mask by key": _case({"mask": lambda random: random(2, 1, 1, 70) > 0}, batch=2),
    "mask, a dead row": _case({"mask": lambda random: (torch.arange(70)[:, None] != 3).expand(1, 1, 70, 70)}),
    "mask, a dead row, nan": _case(
        {"mask": lambda random: (torch.arange(70)[:, None] != 3).expand(1, 1, 70, 70)}, dead_rows="nan"
    ),
    "mask of documents": _case({"mask": _documents(256, 256)}, batch=2, rows=256, keys=256, width=64),
    "mask of documents, tails, causal": _case(
        {"mask": _documents(300, 210)}, batch=2, rows=300, keys=210, heads=4, key_heads=2, causal="top_left"
    ),
    "mask, padding and causal, dead rows": _case(
        {"mask": _padded_causal(256, 320, 100)}, batch=2, rows=256, keys=320, width=64
    ),
    "mask, padding and causal, dead rows, nan": _case(
        {"mask": _padded_causal(130, 130, 70)}, rows=130, keys=130, width=64, dead_rows="nan"
    ),
    "mask of holes": _case({"mask": _holes}, rows=320, keys=256, width=128),
    "mask of holes, transposed": _case(
        {"mask": lambda random: _holes(random).transpose(2, 3)}, rows=256, keys=320, width=64, delta="recompute"
    ),
    "mask that allows nothing": _case({"mask": lambda random: random(1, 1, 100, 100) > 99}, rows=100, keys=100),
    "softcap": _case(softcap=2.0, causal="top_left"),
    "softcap, scores of 5000": _case(softcap=50.0, size=70.0),
    "logit clip": _case(logit_clip="hard", logit_clip_max=1.0),
    "logit clip tanh": _case(logit_clip="tanh", logit_clip_max=1.0, softcap=3.0),
    "sinks by head": _case({"sinks": lambda random: random(1, 2, 1, 1)}),
    "sinks by row, dead rows": _case(
        {"sinks": lambda random: random(1, 2, 70, 1)}, causal="bottom_right", rows=70, keys=40
    ),
    "dropout": _case(dropout_p=0.3),
    "dropout, grouped, bias": _case(
        {"bias": lambda random: random(1, 4, 70, 70)}, dropout_p=0.3, causal="top_left", heads=4, key_heads=2
    ),
    "lse gradient": _case(lse_gradient=True),
    "recompute": _case(
        {"sinks": lambda random: random(1, 2, 1, 1)}, delta="recompute", lse_gradient=True
    ),
    "delta from the output": _case(delta="output"),
    "normaliser float32": _case(normaliser="float32"),
    "nothing saved": _case(save_residual=False),
    "negative scale": _case(scale=-0.2),
    "large q and k": _case(width=128, size=26.0),
    "one row": _case(rows=1, causal="bottom_right"),
    "one key": _case(keys=1),
    "decode, many keys": _case(rows=1, keys=900, heads=4, key_heads=2, causal="bottom_right"),
    "decode, a mask and a window": _case(
        {"mask": lambda random: random(2, 1, 1, 900) > 0}, batch=2, rows=3, keys=900, causal="bottom_right",
        window_left=700, dead_rows="nan",
    ),
    "decode, dead rows": _case(
        {"mask": lambda random: (torch.arange(900) > 900).expand(1, 1, 1, 900)}, rows=2, keys=900
    ),
    "one row, one key, one head": _case(heads=1, rows=1, keys=1),
}
