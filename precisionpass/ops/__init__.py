"""The ops in ``torch.ops.precisionpass``; importing this package registers all of them."""

from precisionpass.ops import add_norm, attention, layer_norm, observe, rms_norm, softmax
from precisionpass.ops.packed import jagged_attention

__all__ = ["add_norm", "attention", "jagged_attention", "layer_norm", "observe", "rms_norm", "softmax"]
