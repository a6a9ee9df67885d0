"""The score expression of attention: grammar, derivative, and its meaning on torch tensors. A leaf: imports nothing."""
