"""Attention over sequences that several ranks share, in the place of transformers' sdpa attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hp_core.errors import InputError, Problem
from hp_core.parallel.context.all_gather import all_gather_attention
from hp_core.parallel.context.method import PATH, config_problems, head_problems
from hp_core.parallel.context.ring import ring_attention
from hp_core.parallel.context.sequence import SLICE, SequenceSlice
from hp_core.parallel.context.ulysses import ulysses_attention
from hp_core.parallel.plan.shapes import sizes_in_config
from hp_core.parallel.setup import DistributedSetup

Attend = Callable[
    [nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, SequenceSlice, dict[str, Any]],
    torch.Tensor,
]


@dataclass(frozen=True)
class ContextAttention:
    """transformers' sdpa attention, over the keys and values of all ranks that share the sequences.

    Args:
        attend: takes the attention module; query, key and value, (rows, heads, own tokens, features) with their own
            heads and features; the slice; and what else the model hands to its attention. Gives (rows, own tokens,
            heads, features).
    """

    attend: Attend

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it; its mask, of the rank's own positions, is only used without a slice.

        Raises:
            InputError: the attention scores in a way that is not known here.
        """
        sequence_slice = options.pop(SLICE, None)
        if not isinstance(sequence_slice, SequenceSlice):
            found: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, **options
            )
            return found
        if problems := list(score_problems(module, options)):
            raise InputError(problems)
        return self.attend(module, query, key, value, sequence_slice, options), None


def score_problems(module: nn.Module, options: Mapping[str, Any]) -> Iterator[Problem]:
    """How an attention scores that is not known here, from what the model hands to it."""
    for name, meaning in (("position_bias", "learned position bias"), ("softcap", "cap on scores")):
        if options.get(name) is not None:
            message = f"{type(module).__name__}: context parallelism knows no {meaning}"
            yield Problem(message, path=PATH, hint="remove 'cp_size'")


METHODS: Mapping[str, ContextAttention] = MappingProxyType(
    {
        "all_gather": ContextAttention(all_gather_attention),
        "ulysses": ContextAttention(ulysses_attention),
        "ring": ContextAttention(ring_attention),
    }
)


def use_context_attention(model: PreTrainedModel, setup: DistributedSetup) -> None:
    """Have every attention of `model` see the whole sequence where it is told of a slice; otherwise it is sdpa.

    Raises:
        InputError: the model's attention is not transformers' sdpa, its heads can't be exchanged among the ranks, or
            its configuration has what depends on more of a sequence than attention sees.
    """
    found = model.config._attn_implementation
    if found != "sdpa":
        message = f"context parallelism needs the attention of torch, and the model uses {found!r}"
        raise InputError(Problem(message, path=PATH, hint="write model.attn_implementation: sdpa"))
    values = model.config.to_dict()
    problems = [*head_problems(sizes_in_config(values), setup.accelerator), *config_problems(values)]
    if problems:
        raise InputError(problems)
    name = attention_name(setup)
    register(name, METHODS[setup.accelerator.cp_method], sdpa_mask)
    model.set_attn_implementation(name)


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let models whose `attn_implementation` is `name` use these two."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


def require_context_attention(model: nn.Module, setup: DistributedSetup) -> None:
    """Refuse a model whose attention would see this rank's part of a sequence alone.

    Raises:
        InputError: sequences are shared, and nobody called `use_context_attention`.
    """
    if setup.sizes.cp == 1:
        return
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != attention_name(setup):
        message = f"the attention of {type(model).__name__} does not see the parts of a sequence on other ranks"
        hint = "a model builder finishes its skeleton with hp_core.finish_model(model, distributed_setup)"
        raise InputError(Problem(message, path=PATH, hint=hint))


def attention_name(setup: DistributedSetup) -> str:
    """The `attn_implementation` of models whose sequences are shared."""
    return f"hp_context_{setup.accelerator.cp_method}"
