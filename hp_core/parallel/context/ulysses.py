"""Attention of whole sequences for some of the heads: ranks trade parts of sequences for parts of the heads.

Jacobs et al. 2023 (DeepSpeed Ulysses): one exchange before attention, one after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hp_core.errors import InputError, Problem
from hp_core.parallel.context.method import PATH
from hp_core.parallel.context.sequence import SequenceSlice
from hp_core.parallel.expert.exchange import exchange


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_slice: SequenceSlice,
    options: dict[str, Any],
) -> torch.Tensor:
    """(rows, own tokens, heads, features) of the values; the arguments are those of `ContextAttention`."""
    group = sequence_slice.group
    num_ranks, num_heads = group.size(), query.shape[1]
    if num_heads % num_ranks:
        message = f"{type(module).__name__}: {num_heads} attention heads can't be exchanged among {num_ranks} ranks"
        raise InputError(Problem(message, path=PATH, hint="write accelerator.cp_method: ring or all_gather"))
    # As many copies as let each rank have the heads that its queries ask for, and no more.
    copies = num_ranks // math.gcd(key.shape[1], num_ranks)
    key, value = (one.repeat_interleave(copies, dim=1) for one in (key, value))
    query, key, value = _heads_of_all_tokens((query, key, value), group)
    shared_by = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(shared_by, dim=1) for one in (key, value))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=sequence_slice.whole_mask(options.get("sliding_window")),
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return _tokens_of_all_heads(output, group)


def _heads_of_all_tokens(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """From (rows, heads, own tokens, features) to (rows, own heads, all tokens in rank order, features), each."""
    num_ranks = group.size()
    # (ranks, rows, own tokens, heads of the rank, features), of all tensors in one message.
    parts = [one.unflatten(1, (num_ranks, -1)).permute(1, 0, 3, 2, 4) for one in tensors]
    came = _exchanged(torch.cat([one.flatten(3) for one in parts], dim=-1), group)
    split = came.split([one.shape[3] * one.shape[4] for one in parts], dim=-1)
    return [
        one.unflatten(3, part.shape[3:]).permute(1, 3, 0, 2, 4).flatten(2, 3)
        for one, part in zip(split, parts, strict=True)
    ]


def _tokens_of_all_heads(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From (rows, own heads, all tokens, features) to (rows, own tokens, heads, features)."""
    parts = output.unflatten(2, (group.size(), -1)).permute(2, 0, 3, 1, 4)
    return _exchanged(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part r of dimension 0 to rank r; part s comes from rank s."""
    one_each = [1] * group.size()
    return exchange(parts, one_each, one_each, group)
