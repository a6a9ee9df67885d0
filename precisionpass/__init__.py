"""precisionpass: attention, softmax and norms with FP32 statistics, by rules, with a review of every change.

    print(precisionpass.explain(model, args, rules="stable-bf16"))   # a dry run: nothing changes
    model = precisionpass.compile(model, rules="stable-bf16", review="review/")

Importing this package imports nothing heavy: each public name is loaded at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precisionpass.api import compile, explain, is_active, monitor, report, rewrite
    from precisionpass.errors import PrecisionPassError
    from precisionpass.hooks.gradient_norm import clip_grad_norm_
    from precisionpass.hooks.master_weights import MasterWeights
    from precisionpass.hooks.spectral import SpectralMonitor
    from precisionpass.rules.model import Match, Rule
    from precisionpass.sites import Found, Recogniser, default_sites

__version__ = "0.1.0"

__all__ = [
    "Found",
    "MasterWeights",
    "Match",
    "PrecisionPassError",
    "Recogniser",
    "Rule",
    "SpectralMonitor",
    "__version__",
    "clip_grad_norm_",
    "compile",
    "default_sites",
    "explain",
    "is_active",
    "monitor",
    "report",
    "rewrite",
]

_HOME = {
    "Found": "precisionpass.sites",
    "MasterWeights": "precisionpass.hooks.master_weights",
    "Match": "precisionpass.rules.model",
    "PrecisionPassError": "precisionpass.errors",
    "Recogniser": "precisionpass.sites",
    "Rule": "precisionpass.rules.model",
    "SpectralMonitor": "precisionpass.hooks.spectral",
    "clip_grad_norm_": "precisionpass.hooks.gradient_norm",
    "compile": "precisionpass.api",
    "default_sites": "precisionpass.sites",
    "explain": "precisionpass.api",
    "is_active": "precisionpass.api",
    "monitor": "precisionpass.api",
    "report": "precisionpass.api",
    "rewrite": "precisionpass.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
