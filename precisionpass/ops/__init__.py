"""The ops in ``torch.ops.precisionpass``; importing this package registers all of them."""

from precisionpass.ops.attention import attention, attention_backward
from precisionpass.ops.layer_norm import layer_norm, layer_norm_backward
from precisionpass.ops.rms_norm import rms_norm, rms_norm_backward
from precisionpass.ops.softmax import log_softmax, log_softmax_backward, softmax, softmax_backward

__all__ = [
    "attention",
    "attention_backward",
    "layer_norm",
    "layer_norm_backward",
    "log_softmax",
    "log_softmax_backward",
    "rms_norm",
    "rms_norm_backward",
    "softmax",
    "softmax_backward",
]
