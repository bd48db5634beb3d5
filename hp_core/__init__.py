"""The contract and the engine of HyperParallel."""
