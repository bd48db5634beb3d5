"""Attention of a rank's own tokens over the keys and values of all, which each rank gathers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hp_core.parallel.context.sequence import SequenceSlice

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


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
    gathered: torch.Tensor = _GatherTokens.apply(both, sequence_slice.group)  # type: ignore[no-untyped-call]
    key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
    mask = sequence_slice.mask(options.get("sliding_window"))
    output: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **{**options, "is_causal": False})[0]
    return output


class _GatherTokens(torch.autograd.Function):
    """Tokens of all ranks along dimension 2, in rank order; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        first = own.movedim(2, 0).contiguous()
        gathered = first.new_empty((group.size() * len(first), *first.shape[1:]))
        all_gather_single(gathered, first, group=group)
        return gathered.movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        first = outer[0].movedim(2, 0).contiguous()
        own = first.new_empty((len(first) // ctx.group.size(), *first.shape[1:]))
        reduce_scatter_single(own, first, group=ctx.group)
        return own.movedim(0, 2), None
