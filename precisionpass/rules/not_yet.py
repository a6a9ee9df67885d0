"""Settings, values and presets this version cannot carry out yet: refused by name (PP107), never ignored."""

from __future__ import annotations

# name -> what it will do
NOT_YET_SETTINGS = {
    "autotune": "measuring launch parameters instead of taking them from a table",
    "kv_cache": "the format of cached keys and values",
    "budget": "refusing a site whose measured error is above a limit",
    "mask_dtype": "the dtype a mask is added in, now always that of the scores, FP32 or FP64",
}
# products of matmul -> what they are
NOT_YET_PRODUCTS = {
    "dp": "FP8 in dO V^T of the backward",
    "dv": "FP8 in P^T dO of the backward",
    "dq": "FP8 in dS K of the backward",
    "dk": "FP8 in dS^T Q of the backward",
    "forward": "FP8 in the forward of a linear layer",
    "backward": "FP8 in the backward of a linear layer",
}
# (setting, value) -> what to write instead, until it is there.
NOT_YET_VALUES = {
    ("op", "linear"): "linear layers stay as they are",
    ("recipe", "delayed"): 'write "current"',
}
# preset -> why it cannot be used
NOT_YET_PRESETS = {"fp8-linear": "linear layers in FP8 have not landed"}
