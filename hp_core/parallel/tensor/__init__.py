"""Tensor parallelism: the ranks of a group share the heads and features of each layer."""
