"""Focal loss for HyperParallel."""
