"""Triton kernels: the GPU side of the ops, one portable source each. What they compute, the reference specifies."""
