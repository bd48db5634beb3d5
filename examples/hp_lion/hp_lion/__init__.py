"""The Lion optimizer for HyperParallel."""
