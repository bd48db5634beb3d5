"""The first-party replacements, checked by the kit that plugin authors have."""

from __future__ import annotations

from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
)

from hp_core.testing import replacement_checks
from hp_core.testing.checks import Check
from hp_plugins.models.qwen3_moe.adapter.attention import attention
from hp_plugins.models.qwen3_moe.adapter.replacements import feed_forward
from hp_plugins.replacements.fused_qkv import fused_qkv
from hp_plugins.replacements.grouped_experts import grouped_experts
from hp_plugins.replacements.rms_norm import rms_norm
from hp_plugins.replacements.sdpa_attention import sdpa_attention
from hp_plugins.replacements.swiglu import swiglu

OTHERS = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(4, 8)]


@replacement_checks(rms_norm, match="*norm", module_type=LlamaRMSNorm, refuses=[*OTHERS, Gemma2RMSNorm(8)])
def test_rms_norm(check: Check) -> None:
    check()


@replacement_checks(
    sdpa_attention, family="qwen3_moe", match="*.self_attn", module_type=Qwen3MoeAttention, refuses=OTHERS
)
def test_sdpa_attention(check: Check) -> None:
    check()


@replacement_checks(fused_qkv, family="qwen3_moe", match="*.self_attn", module_type=Qwen3MoeAttention, refuses=OTHERS)
def test_fused_qkv(check: Check) -> None:
    check()


@replacement_checks(grouped_experts, family="qwen3_moe", match="*.experts", module_type=Qwen3MoeExperts, refuses=OTHERS)
def test_grouped_experts(check: Check) -> None:
    check()


@replacement_checks(swiglu, match="*.mlp", module_type=LlamaMLP, refuses=OTHERS)
def test_swiglu(check: Check) -> None:
    check()


@replacement_checks(
    attention,
    family="qwen3_moe",
    match="*.self_attn",
    module_type=Qwen3MoeAttention,
    arguments={"fused_qkv": True},
    refuses=OTHERS,
)
def test_attention_of_qwen3_moe(check: Check) -> None:
    check()


@replacement_checks(feed_forward, family="qwen3_moe", match="*.mlp", module_type=Qwen3MoeSparseMoeBlock, refuses=OTHERS)
def test_feed_forward_of_qwen3_moe(check: Check) -> None:
    check()
