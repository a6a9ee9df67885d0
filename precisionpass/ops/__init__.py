"""The ops in ``torch.ops.precisionpass``; importing this package registers all of them."""

from precisionpass.ops.attention import attention, attention_backward

__all__ = ["attention", "attention_backward"]
