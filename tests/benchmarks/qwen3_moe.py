"""Skeletons of Qwen3's mixtures of experts, without weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig


def qwen3_30b() -> PreTrainedModel:
    """Qwen3-30B-A3B."""
    return _skeleton(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
    )


def qwen3_235b() -> PreTrainedModel:
    """Qwen3-235B-A22B."""
    return _skeleton(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
    )


def _skeleton(**sizes: Any) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=151936, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, **sizes
    )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
