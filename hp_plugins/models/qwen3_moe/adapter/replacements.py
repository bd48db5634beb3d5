"""Feed-forwards of Qwen3-MoE: dense and sparse layers under one rule."""

from __future__ import annotations

from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hp_core import ReplacementContext, module_replacement
from hp_plugins.replacements.grouped_experts import grouped_experts
from hp_plugins.replacements.swiglu import swiglu
from hp_plugins.replacements.takeover import Behaviour, take_over


class WithGroupedExperts(Behaviour):
    """A sparse layer's block with its own code and router, and experts run by grouped products."""


@module_replacement
def feed_forward(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """`grouped_experts` inside a sparse layer's block, `swiglu` for a dense layer's feed-forward.

    `mlp_only_layers` and `decoder_sparse_step` decide which layers are which; one rule for `*.mlp` fits them all.

    Raises:
        ArgumentError: see the two replacements.
    """
    if not isinstance(module, Qwen3MoeSparseMoeBlock):
        return swiglu(module=module, module_fqn=module_fqn, context=context)
    block = take_over(module, WithGroupedExperts)
    experts = grouped_experts(module=module.experts, module_fqn=f"{module_fqn}.experts", context=context)
    block.add_module("experts", experts)
    return block
