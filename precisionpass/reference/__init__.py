"""The ops in plain PyTorch, on any device: the specification, the oracle, and the implementation on the CPU."""
