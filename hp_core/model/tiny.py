"""Tiny models of each supported family: configurations, models, and batches that reach all their parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hp_core.training.loss import IGNORE_INDEX

VOCABULARY = 96
# Token ids of the vision-language families; text uses the ids below.
_IMAGE, _VIDEO, _VISION_START, _VISION_END = 90, 91, 92, 93
_NUM_TEXT_IDS = 90

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

LLAMA: Mapping[str, Any] = {"model_type": "llama", "head_dim": 8, **COMMON}
LLAMA_TIED: Mapping[str, Any] = {**LLAMA, "tie_word_embeddings": True}
QWEN3: Mapping[str, Any] = {"model_type": "qwen3", "head_dim": 8, **COMMON}
QWEN3_MOE: Mapping[str, Any] = {"model_type": "qwen3_moe", "head_dim": 8, **COMMON, **_EXPERTS}
# A padding token has no gradient in the embedding, so it is none of the text's.
GEMMA2: Mapping[str, Any] = {"model_type": "gemma2", "head_dim": 8, "pad_token_id": VOCABULARY - 1, **COMMON}
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DEEPSEEK_V3: Mapping[str, Any] = {
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


def _with_vision(model_type: str, **text: Any) -> Mapping[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    return {
        "model_type": model_type,
        "text_config": {"head_dim": 8, **COMMON, **text, "rope_parameters": rope},
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": COMMON["hidden_size"],
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": _IMAGE,
        "video_token_id": _VIDEO,
        "vision_start_token_id": _VISION_START,
        "vision_end_token_id": _VISION_END,
    }


QWEN3_VL = _with_vision("qwen3_vl")
QWEN3_VL_MOE = _with_vision("qwen3_vl_moe", **_EXPERTS)

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": LLAMA,
        "llama_tied": LLAMA_TIED,
        "qwen3": QWEN3,
        "qwen3_moe": QWEN3_MOE,
        "deepseek_v3": DEEPSEEK_V3,
        "gpt2": GPT2,
        "gemma2": GEMMA2,
        "qwen3_vl": QWEN3_VL,
        "qwen3_vl_moe": QWEN3_VL_MOE,
    }
)


def tiny_config(family: str) -> dict[str, Any]:
    """A copy of the family's tiny configuration, as a recipe writes it under `model.config`.

    Raises:
        ValueError: there is no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"no tiny model of the family {family!r}; there are {', '.join(FAMILIES)}")
    return copy.deepcopy(dict(FAMILIES[family]))


def tiny_model(
    family: str, seed: int = 0, *, dtype: torch.dtype = torch.float32, vocab_size: int | None = None
) -> PreTrainedModel:
    """A model of transformers with initial weights from `seed`, in training mode, built by transformers alone.

    `vocab_size` takes the place of the tiny one; a vision-language model has its own all the same. The global random
    stream is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_skeleton(family, vocab_size)
    nn.Module.to(model, dtype)
    model.train()
    return model


def tiny_skeleton(family: str, vocab_size: int | None = None) -> PreTrainedModel:
    """The model as transformers builds it on the current default device, drawing from the global random stream."""
    values = tiny_config(family)
    if vocab_size is not None and "vocab_size" in values:
        values["vocab_size"] = vocab_size
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    # Grouped matrix products know no float64, which the checks compute in.
    model: PreTrainedModel = auto_class(config.model_type).from_config(config, experts_implementation="eager")
    return model


def auto_class(model_type: str) -> Any:
    """The class of transformers that builds models of this type."""
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def tiny_batch(family: str, rows: int = 4, length: int = 12, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Model inputs of shape (rows, length) that reach every parameter: `input_ids`, `labels` and what else it takes.

    The labels are the next tokens, shifted already, with another number of them masked in each row. Rows of a
    vision-language model hold an image of 16 patches, four tokens; the `pixel_values` and `image_grid_thw` of row r
    are the r-th part of each.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _NUM_TEXT_IDS, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(rows):
        labels[row, : (row * 5) % (length - 1)] = IGNORE_INDEX
    inputs = {"input_ids": ids[:, :-1].clone(), "labels": labels}
    if "vision_config" not in FAMILIES[family]:
        return {**inputs, "position_ids": torch.arange(length).repeat(rows, 1)}
    image = torch.tensor([_VISION_START, *[_IMAGE] * 4, _VISION_END])
    inputs["input_ids"][:, 1 : 1 + len(image)] = image
    labels[:, : len(image)] = IGNORE_INDEX
    labels[:, -1] = ids[:, -1]
    return {
        **inputs,
        "mm_token_type_ids": (inputs["input_ids"] == _IMAGE).long(),
        "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(rows, 1),
    }


def take_rows(batch: Mapping[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Some rows of a batch made by `tiny_batch`."""
    rows = len(batch["input_ids"])
    return {
        name: value[start * (len(value) // rows) : stop * (len(value) // rows)].clone() for name, value in batch.items()
    }


def other_text(ids: torch.Tensor) -> torch.Tensor:
    """Another text token for each; tokens that stand for an image stay."""
    return torch.where(ids < _NUM_TEXT_IDS, (ids + 1) % _NUM_TEXT_IDS, ids)
