"""Tiny models of many families with modules swapped by a factory, and what a swap must leave equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hp_core import ReplacementContext
from hp_core.model.replacement.contract import transforms_of
from hp_core.testing.models import COMMON, FAMILIES

CONTEXT = ReplacementContext(
    layer_index=None, model_config=None, sizes={}, mesh=None, device=torch.device("cpu"), dtype=torch.float32
)
IDS = torch.arange(2 * 17).reshape(2, 17) * 7 % 90
# Two documents in the first row, three in the second.
PACKED = torch.tensor([[*range(9), *range(8)], [*range(3), *range(5), *range(9)]])

WINDOWED = {**COMMON, "head_dim": 8, "sliding_window": 5}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **FAMILIES,
    "mistral": {"model_type": "mistral", **WINDOWED},
    "mixtral": {"model_type": "mixtral", **WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **COMMON, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "llama_bias": {**FAMILIES["llama"], "attention_bias": True, "mlp_bias": True},
    "llama_dropout": {**FAMILIES["llama"], "attention_dropout": 0.3},
    "starcoder2": {"model_type": "starcoder2", **COMMON, "sliding_window": 5, "residual_dropout": 0.0},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 8, **COMMON, "attention_dropout": 0.0},
    "olmo2": {"model_type": "olmo2", **COMMON},
    "gemma": {"model_type": "gemma", "head_dim": 8, **COMMON},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 8, **COMMON, "sliding_window": 5},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 8, **COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"model_type": "granite", **COMMON, "attention_multiplier": 0.4},
    "smollm3": {"model_type": "smollm3", **COMMON, "no_rope_layers": [1, 0], "pad_token_id": 0},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **COMMON,
        "head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
}


def model_of(family: str, seed: int = 0, *, attn: str = "sdpa", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of transformers with random weights, biases and norms included, in training mode."""
    values = {**copy.deepcopy(dict(CONFIGS[family])), **more}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, attn_implementation=attn)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Wider than initial weights, so that experts are chosen clearly and attention is not uniform.
            spread = 0.2 if parameter.ndim > 1 else 0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.to(dtype).train()


def swapped(model: Any, factory: Callable[..., Any], match: str, **arguments: Any) -> Any:
    """A copy of a model with every matched module replaced, each named to the factory as in a recipe."""
    model = copy.deepcopy(model)
    hits = [(fqn, module) for fqn, module in model.named_modules() if fnmatchcase(fqn, match)]
    assert hits, f"{match} matches nothing"
    for fqn, module in hits:
        new = factory(module=module, module_fqn=fqn, context=CONTEXT, **arguments)
        assert new is not module
        model.set_submodule(fqn, new, strict=True)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient by its original name: what a replacement fused is taken apart again."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for fqn, module in model.named_modules():
        for transform in transforms_of(module):
            inside = {name: found.pop(f"{fqn}.{name}") for name in transform.replacements}
            found.update({f"{fqn}.{name}": value for name, value in transform.to_original(inside).items()})
    return found


def forward_backward(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of a loss that weighs every one of them differently."""
    model.zero_grad()
    inputs = {"input_ids": IDS, "use_cache": False, **inputs}
    logits = model(**inputs).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits.float() * weights).mean().backward()
    return logits.detach(), gradients(model)


def assert_same(plain: Any, replaced: Any, *, tolerance: float = 1e-6, **inputs: Any) -> None:
    """Logits and every parameter's gradient are near, see `assert_near`."""
    logits, grads = forward_backward(plain, **inputs)
    found, found_grads = forward_backward(replaced, **inputs)
    assert_near(found, logits, tolerance)
    assert found_grads.keys() == grads.keys()
    for name, gradient in grads.items():
        assert_near(found_grads[name], gradient, tolerance, name)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6, name: str = "") -> None:
    """Two tensors differ by no more than `tolerance` of the largest number, or of 1 if that is more."""
    assert found.shape == wanted.shape, name
    assert found.dtype == wanted.dtype, name
    if wanted.numel():
        error = float((found.detach() - wanted.detach()).abs().max())
        assert error <= tolerance * max(1.0, float(wanted.detach().abs().max())), f"{name}: {error}"


def generated(model: Any, prompt: torch.Tensor = IDS[:, :5], length: int = 8, **settings: Any) -> torch.Tensor:
    """Greedy continuation with a cache."""
    with torch.no_grad():
        return model.eval().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
