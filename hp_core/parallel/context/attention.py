"""Attention over sequences that several ranks share: each gathers the keys and values of all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hp_core.errors import InputError, Problem, RunError
from hp_core.parallel.context.sequence import SLICE, SequenceSlice
from hp_core.parallel.setup import DistributedSetup

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

NAME = "hp_context_parallel"


def use_context_attention(model: PreTrainedModel) -> None:
    """Have every attention of `model` see the whole sequence where it is told of a slice; otherwise it is sdpa.

    Raises:
        InputError: the model's attention is not transformers' sdpa.
    """
    found = model.config._attn_implementation
    if found != "sdpa":
        message = f"context parallelism needs the attention of torch, and the model uses {found!r}"
        raise InputError(Problem(message, path="accelerator.cp_size", hint="write model.attn_implementation: sdpa"))
    ALL_ATTENTION_FUNCTIONS.register(NAME, context_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def require_context_attention(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model whose attention would see this rank's part of a sequence alone.

    Raises:
        InputError: sequences are shared, and nobody called `use_context_attention`.
    """
    if setup.sizes.cp == 1:
        return
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != NAME:
        message = f"the attention of {type(model).__name__} does not see the parts of a sequence on other ranks"
        hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
        raise InputError(Problem(message, path="accelerator.cp_size", hint=hint))


def context_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, over the keys and values of all ranks that share the sequences.

    Args:
        module: the attention.
        query: (rows, heads, own tokens, features); `key` and `value` with their own heads and features.
        key: see `query`.
        value: see `query`.
        attention_mask: what transformers makes of the rank's own positions; only used without a slice.
        options: what the model hands to its attention, among it the slice.
    """
    sequence_slice = options.pop(SLICE, None)
    if not isinstance(sequence_slice, SequenceSlice):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("position_bias") is not None:
        raise RunError(f"{type(module).__name__}: context parallelism knows no learned position bias")
    both = torch.cat([key, value], dim=-1)
    gathered: torch.Tensor = _GatherTokens.apply(both, sequence_slice.group)  # type: ignore[no-untyped-call]
    key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
    mask = sequence_slice.mask(options.get("sliding_window"))
    options["is_causal"] = False
    return sdpa_attention_forward(module, query, key, value, mask, **options)


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
