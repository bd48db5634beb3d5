"""RMSNorm in one fused call, for HyperParallel."""
