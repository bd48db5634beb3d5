"""Operations counted from a model's modules: by hand, and against torch's own count of what runs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from hp_core.model.flops import Flops, UnknownFlopsError, training_flops
from hp_core.testing.models import DEEPSEEK_V3, FAMILIES, LLAMA, QWEN3, QWEN3_MOE, auto_class
from tests.model.replacement.rules import apply, skeleton
from tests.plugins.test_replacements_in_models import RULES, rules_of

ALONE: Any = SimpleNamespace(sizes=SimpleNamespace(pp=1))
ROWS, TOKENS = 2, 12
QWEN2_MOE = {**QWEN3_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
# The window of every other layer is 128.
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS = {
    name: {**LLAMA, "model_type": name} for name in ("mistral", "phi", "gpt_neox", "olmo2", "cohere", "gemma3_text")
}
OTHERS |= {"mixtral": {**GPT_OSS, "model_type": "mixtral"}, "gpt_oss": GPT_OSS, "qwen2_moe": QWEN2_MOE}
TEXT = {name: config for name, config in FAMILIES.items() if "vision_config" not in config}


def plain(config: Any) -> Any:
    """A model of transformers whose attention and experts are products of matrices alone."""
    values = dict(config)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    settings._experts_implementation = "eager"
    return auto_class(settings.model_type).from_config(settings, attn_implementation="eager").train()


def run(model: Any) -> int:
    """What torch counts in a forward and backward pass over whole rows, whose every token meets every other."""
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 80
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, position_ids=torch.arange(TOKENS).expand(ROWS, -1), use_cache=False).logits
        logits.float().sum().backward()
    return counter.get_total_flops()


def over_all_pairs(flops: Flops) -> int:
    """What eager attention computes: pairs of tokens that don't see each other, too."""
    return flops.per_token * ROWS * TOKENS + sum(flops.per_pair.values()) * ROWS * TOKENS**2


def test_a_dense_model_by_hand() -> None:
    """Four heads and two of keys, of 8 features; a token is multiplied with everything but the embedding."""
    attention = 32 * 32 + 2 * (32 * 16) + 32 * 32
    feed_forward = 3 * 32 * 48
    head = 32 * 96
    expected = Flops(6 * (2 * (attention + feed_forward) + head), {None: 3 * 2 * (2 * 4 * 8 + 2 * 4 * 8)})
    assert training_flops(skeleton(LLAMA), ALONE) == expected
    # A head that is the embedding is multiplied with all the same, and counts once.
    assert training_flops(skeleton({**LLAMA, "tie_word_embeddings": True}), ALONE) == expected


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (8, 2), (8, 3)])
def test_a_mixture_by_hand(num_experts: int, top_k: int) -> None:
    """A token meets as many experts as it is sent to, however many there are, and the router's whole matrix."""
    model = skeleton({**QWEN3_MOE, "num_experts": num_experts, "num_experts_per_tok": top_k})
    attention = 32 * 32 + 2 * (32 * 16) + 32 * 32
    mixture = top_k * 3 * 32 * 24 + 32 * num_experts
    assert training_flops(model, ALONE).per_token == 6 * (2 * (attention + mixture) + 32 * 96)


def test_shared_experts_count_whole() -> None:
    """Beside two of four experts: one for all tokens of 40 features, with a gate of its own."""
    attention = 32 * 32 + 2 * (32 * 16) + 32 * 32
    mixture = 2 * 3 * 32 * 24 + 32 * 4 + 3 * 32 * 40 + 32
    assert training_flops(skeleton(QWEN2_MOE), ALONE).per_token == 6 * (2 * (attention + mixture) + 32 * 96)


def test_latent_attention_by_hand() -> None:
    """Queries and keys of 16 features, values of 8, in four heads, each through a smaller matrix before."""
    flops = training_flops(skeleton(DEEPSEEK_V3), ALONE)
    attention = (32 * 16 + 16 * 4 * 16) + (32 * (8 + 8) + 8 * 4 * (8 + 8)) + 4 * 8 * 32
    dense, mixture = 3 * 32 * 48, 2 * 3 * 32 * 24 + 32 * 4 + 3 * 32 * 24
    assert flops.per_token == 6 * (2 * attention + dense + mixture + 32 * 96)
    assert flops.per_pair == {None: 3 * 2 * (2 * 4 * 16 + 2 * 4 * 8)}


def test_pairs_are_those_that_see_each_other() -> None:
    """Documents of 3 and 2 tokens have 1 + 2 + 3 and 1 + 2 pairs; with a window of 2, 1 + 2 + 2 and 1 + 2."""
    positions = torch.tensor([[0, 1, 2], [0, 1, 0]])
    assert Flops(10).of_tokens(positions) == 60
    assert Flops(0, {None: 5}).of_tokens(positions) == 5 * (6 + 3 + 1)
    assert Flops(1, {2: 100, None: 1000}).of_tokens(positions) == 6 + 100 * (5 + 3 + 1) + 1000 * (6 + 3 + 1)


def test_windows_are_those_of_each_layer() -> None:
    assert training_flops(skeleton(GPT_OSS), ALONE).per_pair == {128: 3 * 128, None: 3 * 128}
    sliding = {**LLAMA, "model_type": "mistral", "sliding_window": 5}
    assert training_flops(skeleton(sliding), ALONE).per_pair == {5: 3 * 2 * 128}


@pytest.mark.parametrize("name", [*TEXT, *OTHERS])
def test_torch_counts_the_same(name: str) -> None:
    model = plain({**TEXT, **OTHERS}[name])
    assert over_all_pairs(training_flops(model, ALONE)) == run(model)


@pytest.mark.parametrize("case", RULES)
def test_replacements_change_nothing(case: str) -> None:
    config, rules = rules_of(case)
    model = skeleton(config)
    before = training_flops(model, ALONE)
    apply(model, *rules)
    assert training_flops(model, ALONE) == before


FROZEN = [
    (lambda name: "embed" in name, "llama"),
    (lambda name: "lm_head" in name, "llama"),
    (lambda name: "layers.0" in name or "embed" in name, "deepseek_v3"),
    (lambda name: "lm_head" not in name, "qwen3"),
    (lambda name: "mlp" in name, "qwen3_moe"),
    (lambda name: "bias" not in name, "gpt2"),
    (lambda name: "self_attn.k_proj" not in name, "llama"),
    (lambda name: "layers.1.mlp.gate_proj" not in name, "llama"),
    (lambda name: "norm" in name or "wte" in name or ".0." in name, "gpt2"),
]


@pytest.mark.parametrize(("is_frozen", "family"), FROZEN)
def test_frozen_parts_have_the_gradients_that_others_need(is_frozen: Any, family: str) -> None:
    model = plain(TEXT[family])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    assert over_all_pairs(training_flops(model, ALONE)) == run(model)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "targets", [["v_proj"], ["q_proj", "v_proj"], ["o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]]
)
def test_adapters_count_beside_frozen_matrices(family: str, targets: list[str]) -> None:
    model = plain(TEXT[family])
    inject_adapter_in_model(LoraConfig(r=3, target_modules=targets), model)
    assert over_all_pairs(training_flops(model, ALONE)) == run(model)


@pytest.mark.parametrize("targets", [["gate_proj"], ["down_proj"], ["up_proj", "q_proj", "down_proj"], ["lm_head"]])
def test_adapters_behind_attention(targets: list[str]) -> None:
    model = plain(LLAMA)
    inject_adapter_in_model(LoraConfig(r=3, target_modules=targets), model)
    assert over_all_pairs(training_flops(model, ALONE)) == run(model)


def test_a_copy_that_is_trained_in_the_place_of_a_module_counts_alone() -> None:
    model = plain(LLAMA)
    settings = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"])
    inject_adapter_in_model(settings, model)
    assert over_all_pairs(training_flops(model, ALONE)) == run(model)


class Elsewise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.zeros(3, 3))


def with_unknown(model: Any) -> Any:
    model.model.layers[1].mlp.extra = Elsewise()
    return model


def with_list(model: Any) -> Any:
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    return model


def both_ways(model: Any) -> Any:
    model.model.layers[0].self_attn.is_causal = False
    return model


def behind(model: Any) -> Any:
    model.score = nn.Linear(32, 2)
    return model


def experts_alone(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    return model


def more_layers(model: Any) -> Any:
    model.model.more = nn.ModuleList([copy.deepcopy(model.model.layers[0])])
    return model


def no_window(model: Any) -> Any:
    model.config.layer_types = ["sliding_attention"] * 2
    return model


MAMBA = {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
LINEAR = {**QWEN3_MOE, "model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2}
UNKNOWN = {
    "a parameter": (with_unknown, LLAMA, r"model.layers.1.mlp.extra.mixing \(Elsewise\)"),
    "a list": (with_list, LLAMA, r"model.layers.0.mlp.experts is a list"),
    "both ways": (both_ways, LLAMA, r"layers.0.self_attn \(LlamaAttention\) attends to what comes after"),
    "another head": (behind, LLAMA, r"score.weight \(Linear\)"),
    "experts alone": (experts_alone, QWEN3_MOE, "model.layers.0.mlp.experts is trained"),
    "state space": (lambda model: model, MAMBA, r"layers.0 \(MambaBlock\) has no modules of attention"),
    "linear attention": (lambda model: model, LINEAR, "layer 0 has 'linear_attention'"),
    "more layers": (more_layers, QWEN3, r"layer 2 is none of the 2"),
    "no window": (no_window, QWEN3, "layer 0 has 'sliding_attention' without a window"),
    "images": (lambda model: model, FAMILIES["qwen3_vl"], "takes images"),
    "not of transformers": (lambda model: nn.Linear(2, 2), LLAMA, "Linear is no model of transformers"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_named_and_not_guessed(case: str) -> None:
    change, config, message = UNKNOWN[case]
    with torch.device("meta"):
        model = change(plain(config))
    with pytest.raises(UnknownFlopsError, match=message):
        training_flops(model, ALONE)


def test_a_module_in_two_places_counts_twice() -> None:
    once, twice = skeleton(LLAMA), skeleton(LLAMA)
    projection = nn.Linear(32, 32, device="meta")
    once.model.layers[0].mlp.more = projection
    twice.model.layers[0].mlp.more = twice.model.layers[0].mlp.again = projection
    difference = training_flops(twice, ALONE).per_token - training_flops(once, ALONE).per_token
    assert difference == 6 * 32 * 32
