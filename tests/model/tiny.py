"""Tiny configurations of each family, and a setup for building them without a recipe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hp_core.config.models import FsdpConfig, LaunchConfig, MixedPrecisionConfig, TrainingConfig
from hp_core.model.build import build_causal_lm
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import distributed

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 8, **COMMON}
LLAMA = {"model_type": "llama", "head_dim": 8, **COMMON}
LLAMA_TIED = {**LLAMA, "tie_word_embeddings": True}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    **COMMON,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    **COMMON,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "llama_tied": LLAMA_TIED,
    "qwen3_moe": QWEN3_MOE,
    "gpt2": GPT2,
    "deepseek_v3": DEEPSEEK_V3,
}


def a_setup(
    environment: ProcessEnvironment | None = None,
    *,
    fsdp: FsdpConfig | None = None,
    precision: MixedPrecisionConfig | None = None,
    seed: int = 7,
) -> Any:
    """`distributed(...)` for a recipe that says only this."""
    config = SimpleNamespace(
        training=TrainingConfig(train_iters=1, seed=seed, device="cpu"),
        fsdp_config=fsdp or FsdpConfig(),
        mixed_precision=precision or MixedPrecisionConfig(),
        launch=LaunchConfig(timeout=60.0),
    )
    return distributed(environment or ProcessEnvironment(), config)


def build(setup: Any, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """`causal_lm` with the component's defaults."""
    defaults = {
        "pretrained": None,
        "revision": None,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "trust_remote_code": False,
    }
    return build_causal_lm(setup=setup, config=config or {}, **{**defaults, **arguments})


def whole(tensor: Any) -> Any:
    """The full tensor of a DTensor, on this rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
