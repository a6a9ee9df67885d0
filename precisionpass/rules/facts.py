"""What a where condition may ask about a site: every fact, its type, the ops that have it, and its words."""

from __future__ import annotations

from dataclasses import dataclass

from precisionpass.hooks.figures import FIGURES

_ALL = ("attention", "softmax", "log_softmax", "layer_norm", "rms_norm")
_ATTENTION = ("attention",)
_NORMS = ("layer_norm", "rms_norm")
_LAST_AXIS = ("softmax", "log_softmax", *_NORMS)

DTYPES = ("bf16", "fp16", "fp32", "fp64")
DEVICES = ("cpu", "cuda", "meta", "mps", "xpu")
# Other spellings, in conditions and in facts alike.
WORD_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "gpu": "cuda",
}


@dataclass(frozen=True)
class Fact:
    """type: "size" (a whole number, perhaps symbolic), "number", "flag" (true or false) or "word"."""

    type: str
    ops: tuple[str, ...]
    meaning: str
    words: tuple[str, ...] = ()


FACTS = {
    "dtype": Fact("word", _ALL, "dtype of the input (of q for attention)", DTYPES),
    "statistics": Fact("word", _ALL, "dtype the model computes maxima, sums, means and variances in", DTYPES),
    "device": Fact("word", _ALL, "where the input lies", DEVICES),
    "training": Fact("flag", _ALL, "whether the module is in training mode"),
    "batch": Fact("size", _ATTENTION, "number of sequences"),
    "heads": Fact("size", _ATTENTION, "number of query heads"),
    "kv_heads": Fact("size", _ATTENTION, "number of key and value heads"),
    "seq_q": Fact("size", _ATTENTION, "number of queries"),
    "seq_k": Fact("size", _ATTENTION, "number of keys"),
    "head_dim": Fact("size", _ATTENTION, "elements of a query or key"),
    "value_dim": Fact("size", _ATTENTION, "elements of a value"),
    "causal": Fact("flag", _ATTENTION, "whether a query sees only keys up to its own position"),
    "window": Fact("size", _ATTENTION, "most keys a query sees; 0: no window"),
    "masked": Fact("flag", _ATTENTION, "whether a mask tensor is read"),
    "dropout": Fact("number", _ATTENTION, "dropout probability; 0: none"),
    "softcap": Fact("number", _ATTENTION, "bound c of c * tanh(score / c); 0: none"),
    "width": Fact("size", _LAST_AXIS, "elements that are normalised together"),
    "eps": Fact("number", _NORMS, "what is added to the variance"),
}

# What `escalate: when` may ask of a site that runs.
FIGURE_FACTS = {name: Fact("number", _ATTENTION, figure.meaning) for name, figure in FIGURES.items()}


def canonical_word(word: str) -> str:
    """One spelling of a dtype: "bfloat16" and "torch.bfloat16" are "bf16"."""
    short = word.removeprefix("torch.")
    return WORD_ALIASES.get(short, short)
