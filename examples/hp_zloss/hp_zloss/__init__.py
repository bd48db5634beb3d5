"""A z-loss on top of any loss, for HyperParallel."""
