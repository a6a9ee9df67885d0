"""Settings, values and presets this version cannot carry out yet: refused by name (PP107), never ignored."""

from __future__ import annotations

# name -> what it will do
NOT_YET_SETTINGS = {
    "autotune": "measuring launch parameters instead of taking them from a table",
    "matmul": "the format of each matrix product",
    "on_missing_fp8": "what to do where the device has no FP8",
    "kv_cache": "the format of cached keys and values",
    "budget": "refusing a site whose measured error is above a limit",
    "mask_dtype": "the dtype a mask is added in, now always that of the scores, FP32 or FP64",
    "record": "recording statistics of a site while it runs",
    "hooks": "calling functions of yours at a site",
    "escalate": "changing settings when a monitor fires",
}
# (setting, value) -> what to write instead, until it is there.
NOT_YET_VALUES = {
    ("op", "linear"): "linear layers stay as they are",
    ("implementation", "hopper"): 'write "auto" or "triton"',
}
# preset -> why it cannot be used
NOT_YET_PRESETS = dict.fromkeys(("fp8-attention", "fp8-linear"), "FP8 has not landed")
