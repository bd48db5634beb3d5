"""Tiny configurations of each causal family, and builds of them without a recipe."""

from __future__ import annotations

from typing import Any

from hp_core.model.build import build_transformers_model
from hp_core.model.kinds import CAUSAL_LM, IMAGE_TEXT
from hp_core.testing.checks import whole
from hp_core.testing.models import COMMON, DEEPSEEK_V3, GPT2, LLAMA, LLAMA_TIED, QWEN3, QWEN3_MOE
from hp_core.testing.setups import tiny_setup

__all__ = [
    "COMMON",
    "DEEPSEEK_V3",
    "FAMILIES",
    "GPT2",
    "LLAMA",
    "LLAMA_TIED",
    "QWEN3",
    "QWEN3_MOE",
    "a_setup",
    "build",
    "whole",
]

FAMILIES = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "llama_tied": LLAMA_TIED,
    "qwen3_moe": QWEN3_MOE,
    "gpt2": GPT2,
    "deepseek_v3": DEEPSEEK_V3,
}

a_setup = tiny_setup


def build(setup: Any, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """`causal_lm` with the component's defaults, or `image_text` for a family that takes images."""
    defaults = {
        "pretrained": None,
        "revision": None,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "trust_remote_code": False,
    }
    values = config or {}
    kind = IMAGE_TEXT if "vision_config" in values else CAUSAL_LM
    return build_transformers_model(kind, setup=setup, config=values, **{**defaults, **arguments})
