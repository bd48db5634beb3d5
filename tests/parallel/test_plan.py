"""The sharding plan: read off a model on meta, complete, and refused where it can't be carried out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hp_core.errors import InputError
from hp_core.model.tiny import auto_class, tiny_config
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.shapes import SharedSizes, sizes_in_config


def skeleton(family="llama", **values):
    from transformers import AutoConfig

    config = {**tiny_config(family), **values}
    with torch.device("meta"):
        settings = AutoConfig.for_model(config.pop("model_type"), **config)
        return auto_class(settings.model_type).from_config(settings)


def placements(plan, fqn):
    (boundary,) = [one for one in plan.boundaries if one.fqn == fqn]
    return {one.name: (str(one.placement), one.partial) for one in boundary.parameters}


FAMILIES = ["llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3", "gemma2", "qwen3_vl", "qwen3_vl_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_exactly_one_boundary(family):
    model = skeleton(family)
    plan = derive_plan(model, 2)
    named = [f"{one.fqn}.{parameter.name}" for one in plan.boundaries for parameter in one.parameters]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())


def test_norms_of_single_heads_have_partial_gradients():
    plan = derive_plan(skeleton("qwen3"), 2)
    assert placements(plan, "model.layers.1.self_attn") == {
        "q_proj.weight": ("shard(0)", False),
        "k_proj.weight": ("shard(0)", False),
        "v_proj.weight": ("shard(0)", False),
        "o_proj.weight": ("shard(1)", False),
        "q_norm.weight": ("replicate", True),
        "k_norm.weight": ("replicate", True),
    }
    assert placements(plan, "model.layers.1.input_layernorm") == {"weight": ("replicate", False)}


def test_latent_attention_is_cut_by_heads():
    plan = derive_plan(skeleton("deepseek_v3"), 4)
    assert placements(plan, "model.layers.0.self_attn") == {
        "q_a_proj.weight": ("replicate", True),
        "q_a_layernorm.weight": ("replicate", True),
        "q_b_proj.weight": ("shard(0)", False),
        "kv_a_proj_with_mqa.weight": ("replicate", True),
        "kv_a_layernorm.weight": ("replicate", True),
        "kv_b_proj.weight": ("shard(0)", False),
        "o_proj.weight": ("shard(1)", False),
    }
    assert placements(plan, "model.layers.1.mlp.shared_experts")["down_proj.weight"] == ("shard(1)", False)
    assert placements(plan, "model.layers.1.mlp.experts")["gate_up_proj"] == ("replicate", False)


def test_fewer_key_and_value_heads_than_ranks_are_held_by_several():
    plan = derive_plan(skeleton(num_attention_heads=8, num_key_value_heads=2), 4)
    attention = next(one for one in plan.shared if one.kind == "attention")
    slices = {one.name: (one.num_slices, one.partial) for one in attention.parameters}
    assert slices["k_proj.weight"] == slices["v_proj.weight"] == (2, True)
    assert slices["q_proj.weight"] == (1, False)
    # Two query heads a rank share the one head of keys; in the whole model four do.
    assert attention.kv_groups == 2


def test_the_bias_of_a_row_projection_is_whole():
    plan = derive_plan(skeleton(attention_bias=True, mlp_bias=True), 2)
    assert placements(plan, "model.layers.0.self_attn")["q_proj.bias"] == ("shard(0)", False)
    assert placements(plan, "model.layers.0.self_attn")["o_proj.bias"] == ("replicate", False)


def test_bytes_are_those_of_the_hidden_state_at_each_edge():
    """Two layers of two regions, each with an all-reduce of 32 floats in either direction; both ends, and 96 logits."""
    layers, ends = 2 * 2 * 2 * 32, 2 * 32
    assert derive_plan(skeleton(), 2).bytes_per_token == (layers + ends + 96) * 4
    assert derive_plan(skeleton().to(torch.bfloat16), 2).bytes_per_token == (layers + ends + 96) * 2
    assert derive_plan(skeleton(), 2, loss_parallel=True).bytes_per_token == (layers + ends) * 4
    # Instead of an all-reduce, a gathering in one pass and a scattering of sums in the other, in either direction.
    on_sequences = derive_plan(skeleton(), 2, sequence_parallel=True)
    assert on_sequences.bytes_per_token == (2 * layers + ends + 96 + 2 * 32) * 4


def test_everything_that_does_not_divide_comes_at_once_with_what_would():
    with pytest.raises(InputError) as caught:
        derive_plan(skeleton(num_attention_heads=8, num_key_value_heads=4, intermediate_size=44), 3)
    assert [str(problem) for problem in caught.value.problems] == [
        "accelerator.tp_size: 8 attention heads can't be shared by 3 ranks; use 1, 2 or 4",
        "accelerator.tp_size: 4 key and value heads can't be shared by 3 ranks; use 1, 2 or 4",
        "accelerator.tp_size: an MLP of width 44 can't be shared by 3 ranks; use 1, 2 or 4",
    ]


def test_a_model_with_fused_projections_alone_is_refused():
    with pytest.raises(InputError, match="GPT2LMHeadModel has no attention or MLP that ranks can share"):
        derive_plan(skeleton("gpt2"), 2)


def test_what_sees_all_heads_at_once_stays_whole_and_says_so():
    model = skeleton("qwen3")
    model.model.layers[0].self_attn.q_norm.weight = nn.Parameter(torch.empty(32, device="meta"))
    plan = derive_plan(model, 2)
    boundary = next(one for one in plan.boundaries if one.fqn == "model.layers.0.self_attn")
    assert (boundary.kind, boundary.note) == ("replicated", "q_norm.weight is no parameter of a single head")
    assert placements(plan, "model.layers.0.self_attn.q_proj") == {"weight": ("replicate", False)}
    assert next(one for one in plan.boundaries if one.fqn == "model.layers.1.self_attn").kind == "attention"


def test_a_number_for_each_head_is_not_taken_for_a_norm_of_one():
    """Where there are as many heads as a head has features, both have the same shape."""
    model = skeleton("qwen3", num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.empty(8, device="meta"))
    boundary = next(one for one in derive_plan(model, 2).boundaries if one.fqn == "model.layers.0.self_attn")
    assert (boundary.kind, boundary.note) == ("replicated", "sinks is no parameter of a single head")
    assert [one.name for one in boundary.parameters] == ["sinks"]


def test_an_mlp_that_compares_its_features_stays_whole_and_says_so():
    model = skeleton()
    model.model.layers[1].mlp.activation_sparsity = 0.95
    boundary = next(one for one in derive_plan(model, 2).boundaries if one.fqn == "model.layers.1.mlp")
    assert (boundary.kind, boundary.note) == ("replicated", "its activation compares all features")


class GatedLinear(nn.Linear):
    """A projection that learns how much it gives."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.alpha * super().forward(x).tanh()


class Adapted(nn.Linear):
    """A projection with a child, as adapters are put into it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lora = nn.Linear(self.in_features, self.out_features)


@pytest.mark.parametrize("kind", [GatedLinear, Adapted])
@pytest.mark.parametrize("name", ["self_attn.o_proj", "self_attn.q_proj", "mlp.down_proj"])
def test_a_projection_that_is_not_plain_keeps_its_region_whole(kind, name):
    model = skeleton()
    path, _, child = f"model.layers.0.{name}".rpartition(".")
    region = model.get_submodule(path)
    plain = region.get_submodule(child)
    with torch.device("meta"):
        region.register_module(child, kind(plain.in_features, plain.out_features, bias=False))
    plan = derive_plan(model, 2)
    (boundary,) = [one for one in plan.boundaries if one.fqn == path]
    assert (boundary.kind, boundary.note) == ("replicated", f"its {child} is no plain torch.nn.Linear")
    assert all(dim == ("replicate", False) for dim in placements(plan, f"{path}.{child}").values())


def test_an_attention_with_fused_projections_stays_whole_and_says_so():
    model = skeleton()
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = attention.q_proj
    del attention.q_proj, attention.k_proj, attention.v_proj
    boundary = next(one for one in derive_plan(model, 2).boundaries if one.fqn == "model.layers.0.self_attn")
    assert (boundary.kind, boundary.note) == ("replicated", "its projections are fused, or not linear")


def test_explain_prints_layers_that_are_planned_alike_once():
    plan = derive_plan(skeleton("qwen3"), 2)
    text = plan.explain()
    assert text.startswith("tensor parallelism over 2 ranks: 1,664 bytes a token in collectives\n")
    assert text.count("Qwen3Attention") == 1
    assert (
        "model.layers.*.mlp, 2 times (Qwen3MLP): mlp\n"
        "  gate_proj.weight [48, 32]: shard(0)\n"
        "  up_proj.weight [48, 32]: shard(0)\n"
        "  down_proj.weight [32, 48]: shard(1)\n"
        "  input x: replicate -> replicate: all_reduce in backward, 128 bytes a token\n"
        "  output down_proj: partial -> replicate: all_reduce in forward, 128 bytes a token\n"
    ) in text
    assert "  q_norm.weight [8]: replicate (gradient partial)" in plan.explain("model.layers.1.self_attn")
    with pytest.raises(KeyError, match=r"no boundary .model\.layers."):
        plan.explain("model.layers")


def test_a_plan_is_data_and_changes_nothing():
    model = skeleton()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert derive_plan(model, 2) == derive_plan(model, 2)
    assert hash(derive_plan(model, 2)) == hash(derive_plan(model, 2))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        derive_plan(model, 2).tp_size = 4


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"num_attention_heads": 8, "intermediate_size": 40}, SharedSizes(frozenset({(8, 8)}), frozenset({40}))),
        ({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}, SharedSizes(frozenset({(8, 2)}))),
        # The width is that of dense layers, which a mixture need not have.
        ({"num_experts": 4, "intermediate_size": 41}, SharedSizes()),
        # Latent attention has keys and values for every head.
        ({"kv_lora_rank": 8, "num_attention_heads": 4, "num_key_value_heads": 1}, SharedSizes(frozenset({(4, 4)}))),
        ({"n_head": 4}, SharedSizes()),
    ],
)
def test_what_a_configuration_says(config, sizes):
    assert sizes_in_config(config) == sizes


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "qwen3_vl"])
@pytest.mark.parametrize("tp_size", [2, 3, 4, 8])
def test_the_configuration_refuses_nothing_that_the_model_would_not(family, tp_size):
    problems = sizes_in_config(tiny_config(family)).problems(tp_size)
    if not problems:
        derive_plan(skeleton(family), tp_size)
        return
    with pytest.raises(InputError) as caught:
        derive_plan(skeleton(family), tp_size)
    assert {one.message for one in problems} <= {one.message for one in caught.value.problems}


def edges(plan, fqn):
    (boundary,) = [one for one in plan.boundaries if one.fqn == fqn]
    inputs = [f"{one.name}: {one.src} -> {one.dst}" for one in boundary.inputs]
    return inputs, None if boundary.output is None else f"{boundary.output.src} -> {boundary.output.dst}"


def test_embedding_and_head_are_cut_by_vocabulary():
    plan = derive_plan(skeleton(vocab_size=97), 2)
    assert placements(plan, "model.embed_tokens") == {"weight": ("shard(0)", False)}
    assert placements(plan, "lm_head") == {"weight": ("shard(0)", False)}
    assert edges(plan, "model.embed_tokens") == ([], "partial -> replicate")
    assert edges(plan, "lm_head") == (["input: replicate -> replicate"], "shard(-1) -> replicate")
    assert edges(derive_plan(skeleton(), 2, loss_parallel=True), "lm_head")[1] == "shard(-1) -> shard(-1)"


def test_tied_weights_are_cut_once():
    plan = derive_plan(skeleton("llama_tied"), 2)
    assert placements(plan, "model.embed_tokens") == {"weight": ("shard(0)", False)}
    assert placements(plan, "lm_head") == {}
    assert edges(plan, "lm_head")[1] == "shard(-1) -> replicate"


class ScaledEmbedding(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


@pytest.mark.parametrize(("family", "head"), [("llama", ""), ("llama_tied", "its weight is that of an embedding that")])
def test_an_embedding_that_is_not_plain_stays_whole_and_says_so(family, head):
    model = skeleton(family)
    model.model.embed_tokens.__class__ = ScaledEmbedding
    plan = derive_plan(model, 2)
    notes = {one.fqn: (one.kind, one.note) for one in plan.boundaries}
    assert notes["model.embed_tokens"] == ("replicated", "it is no plain torch.nn.Embedding")
    assert notes["lm_head"][0] == ("replicated" if head else "head")
    assert notes["lm_head"][1].startswith(head)
    assert "replicated: it is no plain torch.nn.Embedding" in plan.explain("model.embed_tokens")


def test_a_vocabulary_that_leaves_a_rank_without_tokens_stays_whole():
    plan = derive_plan(skeleton(vocab_size=5, num_attention_heads=4, num_key_value_heads=4), 4)
    notes = {one.fqn: one.note for one in plan.boundaries}
    assert notes["lm_head"] == notes["model.embed_tokens"] == "its 5 rows leave a rank without any"


def test_loss_parallelism_needs_a_head_that_can_be_cut():
    model = skeleton("llama_tied")
    model.model.embed_tokens.__class__ = ScaledEmbedding
    with pytest.raises(InputError) as caught:
        derive_plan(model, 2, loss_parallel=True)
    (problem,) = caught.value.problems
    assert problem.path == "accelerator.loss_parallel"
    assert problem.message.startswith("the head of LlamaForCausalLM can't be cut by vocabulary: its weight is that of")


def test_sequences_are_cut_from_the_first_layer_to_the_last_norm():
    plan = derive_plan(skeleton("qwen3"), 2, sequence_parallel=True)
    whole, part = "replicate", "shard(1)"
    assert edges(plan, "model.embed_tokens") == ([], "partial -> replicate")
    assert edges(plan, "model.layers.0") == ([f"hidden_states: {whole} -> {part}"], None)
    assert "model.layers.1" not in {one.fqn for one in plan.boundaries}
    for fqn in ("model.layers.1.input_layernorm", "model.layers.0.post_attention_layernorm"):
        assert edges(plan, fqn) == ([f"hidden_states: {part} -> {part}"], None)
        assert placements(plan, fqn) == {"weight": ("replicate", True)}
    assert edges(plan, "model.layers.1.self_attn") == ([f"hidden_states: {part} -> {whole}"], f"partial -> {part}")
    assert edges(plan, "model.layers.1.mlp") == ([f"x: {part} -> {whole}"], f"partial -> {part}")
    assert edges(plan, "model.norm") == ([f"hidden_states: {part} -> {part}"], f"{part} -> {whole}")
    assert placements(plan, "model.norm") == {"weight": ("replicate", True)}


def test_mixtures_see_whole_sequences():
    plan = derive_plan(skeleton("deepseek_v3"), 2, sequence_parallel=True)
    assert edges(plan, "model.layers.1.mlp") == (["hidden_states: shard(1) -> replicate"], "replicate -> shard(1)")
    assert edges(plan, "model.layers.1.mlp.shared_experts") == (["x: replicate -> replicate"], "partial -> replicate")
    assert placements(plan, "model.layers.1.mlp.gate") == {"weight": ("replicate", False)}
    assert [str(one) for one in next(b for b in plan.boundaries if b.fqn == "model.layers.1.mlp").edges] == [
        "hidden_states: shard(1) -> replicate: all_gather in forward, 128 bytes a token",
        "replicate -> shard(1): all_gather in backward, 128 bytes a token",
    ]


def test_the_bias_behind_a_region_is_added_to_parts():
    plan = derive_plan(skeleton(attention_bias=True), 2, sequence_parallel=True)
    assert placements(plan, "model.layers.0.self_attn")["o_proj.bias"] == ("replicate", True)
    assert placements(plan, "model.layers.0.self_attn")["q_proj.bias"] == ("shard(0)", False)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "deepseek_v3", "gemma2"])
def test_cutting_sequences_loses_no_parameter(family):
    model = skeleton(family)
    plan = derive_plan(model, 2, sequence_parallel=True)
    named = [f"{one.fqn}.{parameter.name}" for one in plan.boundaries for parameter in one.parameters]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())


def own_parameter(model):
    model.model.layers[1].scale = nn.Parameter(torch.empty(1, device="meta"))


def own_dropout(model):
    model.model.layers[1].dropout = 0.1


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_vl", None, "Qwen3VLForConditionalGeneration puts more than text into its sequences"),
        ("llama", own_parameter, "model.layers.1: LlamaDecoderLayer computes with its own 'scale'"),
        (
            "llama",
            own_dropout,
            "model.layers.1: LlamaDecoderLayer drops in its own forward, where all ranks draw alike",
        ),
    ],
)
def test_models_whose_sequences_can_not_be_cut_are_refused(family, change, message):
    model = skeleton(family)
    if change is not None:
        change(model)
    with pytest.raises(InputError) as caught:
        derive_plan(model, 2, sequence_parallel=True)
    assert [str(one) for one in caught.value.problems] == [
        f"accelerator.sequence_parallel: {message}; remove 'sequence_parallel'"
    ]
