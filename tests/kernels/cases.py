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
    tensors: dict[str, Callable[[Random], Tensor | tuple[Tensor, ...]]] = field(default_factory=dict)
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
        tensors = {name: _moved(make(random), device) for name, make in self.tensors.items()}
        return AttentionArguments(q, k, v, **tensors, **settings)

    def upstream(self, arguments: AttentionArguments, seed: int = 1) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of output, lse (None unless the case has one) and probabilities (None unless returned)."""
        generator = torch.Generator().manual_seed(seed)
        q, v = arguments.q, arguments.v
        output = torch.randn(*q.shape[:2], q.shape[2], v.shape[3], generator=generator).to(q)
        lse = torch.randn(q.shape[:3], generator=generator).to(q.device) if self.lse_gradient else None
        if arguments.probabilities == "none":
            return output, lse, None
        probabilities = torch.randn(*q.shape[:3], arguments.k.shape[2], generator=generator).to(q)
        return output, lse, probabilities


def _moved(made: Tensor | tuple[Tensor, ...], device: str) -> Tensor | tuple[Tensor, ...]:
    return made.to(device) if isinstance(made, Tensor) else tuple(part.to(device) for part in made)


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


def _packed(rows: list[int], keys: list[int]) -> dict[str, Callable[[Random], Tensor]]:
    """cu_seqlens of sequences of these lengths."""
    lengths = {"cu_seqlens_q": rows, "cu_seqlens_k": keys}
    bounds = {name: torch.tensor([0, *count]).cumsum(0).to(torch.int32) for name, count in lengths.items()}
    return {name: lambda random, bound=bound: bound for name, bound in bounds.items()}


def _repeated_maxima(random: Random) -> Tensor:
    """Scores of 20 at one place in odd rows, at two in even ones, in different tiles; after them, 11.6.

    Shifted by 9 (the op allows 8) exp(11.6 - 29) rounds to 0 in FP16: even rows lose what odd ones keep.
    """
    bias = torch.full((1, 1, 70, 300), -60.0)
    bias[..., 3], bias[..., ::2, 100], bias[..., 128:] = 20.0, 20.0, 11.6
    return bias


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
    "bias that sequences share": _case(
        {"bias": lambda random: random(1, 2, 70, 70)}, batch=9, key_heads=1, causal="top_left"
    ),
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
    "mask of documents, dropout": _case(
        {"mask": _documents(256, 256)}, batch=2, rows=256, keys=256, width=64, dropout_p=0.2
    ),
    "mask of documents, nan": _case(
        {"mask": _documents(256, 256)}, batch=2, rows=256, keys=256, width=64, causal="top_left", dead_rows="nan"
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
    "output clip": _case(output_clip=0.2, causal="top_left"),
    "output clip, recompute": _case(output_clip=0.2, delta="recompute", dropout_p=0.3),
    "decode, output clip": _case(output_clip=0.05, rows=2, keys=900),
    "row_max_shift, a maximum at two places": _case(
        {"bias": _repeated_maxima}, size=0.0, keys=300, row_max_shift=(2.0, 9.0, 0.0), save_residual=False,
    ),
    "row_max_shift, negative, within a tolerance": _case(
        {"bias": lambda random: 0.2 * _repeated_maxima(random) - 30.0}, size=0.01, keys=300,
        row_max_shift=(2.0, 8.0, 2.0), causal="top_left",
    ),
    "row_max_shift, sinks, dead rows": _case(
        {"sinks": lambda random: random(1, 2, 1, 1), "mask": lambda random: random(1, 1, 70, 70) > 1.5},
        row_max_shift=(4.0, 6.0, 0.5),
    ),
    "decode, row_max_shift": _case(rows=2, keys=900, row_max_shift=(3.0, 8.0, 0.3)),
    "probabilities": _case(probabilities="softmax", causal="top_left", rows=100, keys=90),
    "probabilities, grouped, sinks, lse gradient": _case(
        {"sinks": lambda random: random(1, 4, 1, 1)}, probabilities="softmax", heads=4, key_heads=2, lse_gradient=True
    ),
    "probabilities before dropout": _case(probabilities="softmax", dropout_p=0.3),
    "probabilities after dropout": _case(
        {"bias": lambda random: random(1, 1, 70, 70)}, probabilities="dropped", dropout_p=0.3, delta="output"
    ),
    "probabilities, rows of finfo.min": _case({"bias": _first_rows_filled(MINIMUM)}, probabilities="softmax"),
    "probabilities, a dead row, nan": _case(
        {"mask": lambda random: (torch.arange(70)[:, None] != 3).expand(1, 1, 70, 70)}, dead_rows="nan",
        probabilities="softmax",
    ),
    "decode, probabilities": _case(rows=1, keys=900, probabilities="softmax", causal="bottom_right", softcap=3.0),
    "packed": _case(_packed([70, 1, 0, 99], [70, 1, 5, 99]), rows=170, keys=175),
    "packed, causal, padding behind": _case(
        _packed([40, 3, 90], [40, 3, 90]), rows=140, keys=150, causal="top_left", heads=4, key_heads=2
    ),
    "packed, bottom_right, without keys": _case(
        _packed([20, 5, 64, 33], [80, 0, 64, 7]), rows=122, keys=151, causal="bottom_right", lse_gradient=True
    ),
    "packed, window, sinks, recompute": _case(
        _packed([100, 30], [100, 30]) | {"sinks": lambda random: random(1, 2, 130, 1)}, rows=130, keys=130,
        window_left=9, window_right=4, delta="recompute",
    ),
    "packed, mask, dropout, softcap": _case(
        _packed([64, 66], [33, 97]) | {"mask": lambda random: random(1, 1, 130, 130) > -1}, rows=130, keys=130,
        dropout_p=0.3, softcap=2.0,
    ),
    "packed, more sequences than blocks": _case(_packed([1, 0, 2, 1] * 4, [2, 3, 0, 4] * 4), rows=17, keys=40),
    "packed, nothing but padding": _case(_packed([0, 0], [0, 3]), rows=20, keys=20, causal="top_left"),
    "score": _case(
        {"score_inputs": lambda random: (random(1, 2, 1, 1), random(1, 1, 1, 70) > 0)},
        score="where(t1 and i - j < 40, s * t0, -inf) - 0.01 * (i - j) + 0.1 * h", causal="top_left",
    ),
    "score, every operation": _case(
        {"score_inputs": lambda random: (random(2, 1, 30, 40), random(1, 2, 30, 1))}, batch=2, key_heads=1, rows=30,
        keys=40,
        score="max(s, t0) * min(s, 2 * t0) / (1 + exp(-s * t1)) + sqrt(abs(s) + 1) - log(s * s + 1) + tanh(t1)"
        " + clamp(s, -1, t0) * b + where(not s > t0 or j == 3, t0 >= 0, -s)",
    ),
    "score, softcap, bias, sinks, dropout, probabilities": _case(
        {"bias": lambda random: random(1, 1, 70, 70), "sinks": lambda random: random(1, 2, 1, 1)}, softcap=3.0,
        score="s * s - 0.5", dropout_p=0.2, probabilities="dropped", logit_clip="hard", logit_clip_max=2.5,
    ),
    "score, rows of finfo.min": _case(score=f"where(i < 5, {MINIMUM!r}, s)", save_residual=False),
    "score without s": _case(
        {"score_inputs": lambda random: (random(1, 2, 1, 70),)}, score="t0 + i / 70", normaliser="float32"
    ),
    "score, packed": _case(
        _packed([40, 3, 0, 60], [50, 30, 5, 9]) | {"score_inputs": lambda random: (random(1, 1, 105, 94),)},
        rows=105, keys=94, score="s + t0 * j / 10 - i / 20 + b * where(j < 7, 1, s)", causal="bottom_right",
    ),
    "decode, score": _case(
        {"score_inputs": lambda random: (random(1, 2, 1, 900),)}, rows=1, keys=900, score="s * 2 + t0", dead_rows="nan"
    ),
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
