"""Attention of Qwen3-MoE, with its norms per head replaced as well."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from hp_core import ArgumentError, ReplacementContext, module_replacement
from hp_plugins.replacements.attention import with_norms
from hp_plugins.replacements.fused_qkv import fused_qkv as with_fused_qkv
from hp_plugins.replacements.rms_norm import rms_norm
from hp_plugins.replacements.sdpa_attention import sdpa_attention


@module_replacement
def attention(
    module: nn.Module,
    module_fqn: str,
    context: ReplacementContext,
    *,
    fused_qkv: Annotated[bool, Field(description="Project queries, keys and values in one product.")] = False,
) -> nn.Module:
    """`sdpa_attention`, or `fused_qkv`, whose q_norm and k_norm are computed by `F.rms_norm`.

    A rule can't replace a module inside one that another rule replaces, so the norms go with the attention.

    Raises:
        ArgumentError: the module is not this family's attention; see the two replacements for other reasons.
    """
    if not isinstance(module, Qwen3MoeAttention):
        raise ArgumentError("", f"{type(module).__name__} is no Qwen3MoeAttention", "use sdpa_attention or fused_qkv")
    build = with_fused_qkv if fused_qkv else sdpa_attention
    attended = build(module=module, module_fqn=module_fqn, context=context)
    return with_norms(attended, lambda name, norm: rms_norm(norm, f"{module_fqn}.{name}", context))
