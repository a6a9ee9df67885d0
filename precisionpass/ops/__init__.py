"""The ops in ``torch.ops.precisionpass``; importing this package registers all of them."""

from precisionpass.ops import attention, layer_norm, rms_norm, softmax

__all__ = ["attention", "layer_norm", "rms_norm", "softmax"]
