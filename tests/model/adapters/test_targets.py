from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.config.peft import PeftConfig
from hp_core.errors import InputError
from hp_core.model.adapters.targets import choose
from hp_core.model.tiny import tiny_skeleton

LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def chosen(family: str = "llama", **values: Any) -> Any:
    with torch.device("meta"):
        model = tiny_skeleton(family)
    return choose(model, PeftConfig(method="lora", **values))


def names(targets: tuple[str, ...]) -> set[str]:
    return {one.removeprefix("model.layers.") for one in targets}


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    found = chosen()
    assert len(found.targets) == 2 * len(LAYER)
    assert {one.rpartition(".")[2] for one in found.targets} == set(LAYER)
    # Those of GPT-2 are transposed, and of another class.
    assert {one.rpartition(".")[2] for one in chosen("gpt2").targets} == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"target_modules": "q_proj"}, {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        ({"target_modules": "self_attn.q_proj"}, {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        ({"target_modules": "model.layers.1.*.[kv]_proj"}, {"1.self_attn.k_proj", "1.self_attn.v_proj"}),
        (
            {"target_modules": ["q_proj", "1.mlp.up_proj"], "exclude_modules": "*.0.*"},
            {"1.self_attn.q_proj", "1.mlp.up_proj"},
        ),
        ({"target_modules": ["lm_head", "embed_tokens"]}, {"model.embed_tokens", "lm_head"}),
        ({"exclude_modules": ["*.mlp.*", "*.[kqv]_proj", "0.self_attn.o_proj"]}, {"1.self_attn.o_proj"}),
        (
            {"modules_to_save": ["*.mlp", "self_attn.q_proj", "*.[kv]_proj", "1.self_attn.o_proj"]},
            {"0.self_attn.o_proj"},
        ),
    ],
)
def test_patterns_are_ends_of_names_or_globs(values: dict[str, Any], wanted: set[str]) -> None:
    assert names(chosen(**values).targets) == wanted


def test_what_is_trained_whole_is_named_likewise() -> None:
    assert chosen(modules_to_save=["lm_head", "norm"]).saved == ("model.norm", "lm_head")


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        (
            {"target_modules": ["q_proj", "q_prj"]},
            "peft.target_modules[1]",
            "'q_prj' matches no module of the model; did you mean 'q_proj'?",
        ),
        (
            {"target_modules": "*.mlp"},
            "peft.target_modules",
            "a LlamaMLP, and LoRA is for linear layers and embeddings",
        ),
        ({"target_modules": "norm"}, "peft.target_modules", "a LlamaRMSNorm"),
        (
            {"target_modules": "q_proj", "exclude_modules": "k_proj"},
            "peft.exclude_modules",
            "matches none of target_modules",
        ),
        ({"target_modules": "q_proj", "exclude_modules": "q_proj"}, "peft.target_modules", "chooses no module"),
        ({"modules_to_save": "lm_heat"}, "peft.modules_to_save", "did you mean 'lm_head'?"),
        ({"modules_to_save": "layers"}, "peft.modules_to_save", "a list, which has no forward pass"),
        ({"modules_to_save": "rotary_emb"}, "peft.modules_to_save", "which has no weights"),
        (
            {"target_modules": "q_proj", "modules_to_save": "self_attn"},
            "peft.modules_to_save",
            "'model.layers.0.self_attn.q_proj' is inside 'model.layers.0.self_attn'",
        ),
        ({"target_modules": "q_proj", "modules_to_save": "q_proj"}, "peft.modules_to_save", "is trained whole itself"),
        ({"modules_to_save": ["*.mlp", "up_proj"]}, "peft.modules_to_save", "is inside 'model.layers.0.mlp'"),
    ],
)
def test_patterns_without_sense_are_refused(values: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        chosen(**values)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert message in f"{problem.message}; {problem.hint}"


@pytest.mark.parametrize("values", [{"target_modules": "lm_head"}, {"modules_to_save": "embed_tokens"}])
def test_a_weight_that_is_two_modules_is_left_alone(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"the weight of '[\w.]+' is that of '[\w.]+', too"):
        chosen("llama_tied", **values)


def test_all_problems_come_together() -> None:
    with pytest.raises(InputError) as caught:
        chosen(target_modules=["q_prj", "*.mlp"], exclude_modules="x", modules_to_save="y")
    assert len(caught.value.problems) == 4


def test_the_share_of_a_real_model_is_small() -> None:
    """The figure of `examples/smollm2_sft/lora.yaml`, for a model of SmolLM2-135M's sizes."""
    from hp_core.model.adapters.inject import inject_adapters
    from tests.model.tiny import a_setup

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    config = AutoConfig.for_model("llama", **sizes, **heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with a_setup() as setup:
        inject_adapters(model, PeftConfig(method="lora", target_modules=attention, r=8), setup)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    # Of each layer: queries and outputs are 576 by 576, keys and values 192 by 576.
    assert trained == 30 * 8 * (2 * (576 + 576) + 2 * (576 + 192)) == 921_600
    assert trained / sum(one.numel() for one in model.parameters()) < 0.01
