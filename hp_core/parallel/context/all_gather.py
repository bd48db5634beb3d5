"""Attention of a rank's own tokens over the keys and values of all, which each rank gathers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hp_core.parallel.context.sequence import SequenceSlice
from hp_core.parallel.plan.edge import REPLICATE, Edge, shard
from hp_core.parallel.tensor.collectives import cross


def all_gather_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_slice: SequenceSlice,
    options: dict[str, Any],
) -> torch.Tensor:
    """(rows, own tokens, heads, features) of the values; the arguments are those of `ContextAttention`."""
    both = torch.cat([key, value], dim=-1)
    # Each rank uses what it gathers for its own tokens, so the gradients are summands.
    edge = Edge("", shard(2), REPLICATE, both.shape[-1], both.itemsize, is_shared=True)
    gathered = cross(both, edge, sequence_slice.group)
    key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
    mask = sequence_slice.mask(options.get("sliding_window"))
    output: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **{**options, "is_causal": False})[0]
    return output
