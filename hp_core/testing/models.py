"""Tiny models of each supported family, and batches that reach all their parameters."""

from __future__ import annotations

from hp_core.model.tiny import (
    COMMON,
    DEEPSEEK_V3,
    FAMILIES,
    GEMMA2,
    GPT2,
    LLAMA,
    LLAMA_TIED,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    VOCABULARY,
    auto_class,
    other_text,
    take_rows,
    tiny_batch,
    tiny_config,
    tiny_model,
    tiny_skeleton,
)

__all__ = [
    "COMMON",
    "DEEPSEEK_V3",
    "FAMILIES",
    "GEMMA2",
    "GPT2",
    "LLAMA",
    "LLAMA_TIED",
    "QWEN3",
    "QWEN3_MOE",
    "QWEN3_VL",
    "QWEN3_VL_MOE",
    "VOCABULARY",
    "auto_class",
    "other_text",
    "take_rows",
    "tiny_batch",
    "tiny_config",
    "tiny_model",
    "tiny_skeleton",
]
