"""Attention for Hopper GPUs in Gluon: the formulas of the portable kernels, with the schedule written by hand."""

from precisionpass.kernels.hopper.limits import GLUON, backward_refusal, chosen, refusal

if GLUON:
    from precisionpass.kernels.hopper.launch import backward, forward

__all__ = ["backward", "backward_refusal", "chosen", "forward", "refusal"]
