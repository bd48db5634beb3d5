from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from hp_core import ArgumentError
from hp_plugins.replacements.fused_qkv import FusedQKVAttention, fused_qkv
from hp_plugins.replacements.sdpa_attention import SdpaAttention, packed_documents, sdpa_attention
from tests.plugins.replacing import (
    CONTEXT,
    IDS,
    PACKED,
    assert_same,
    forward_backward,
    generated,
    model_of,
    swapped,
)

ATTENTION = {
    "llama": "*self_attn",
    "llama_bias": "*self_attn",
    "qwen2": "*self_attn",
    "qwen3": "*self_attn",
    "qwen3_moe": "*self_attn",
    "qwen3_vl_moe": "*language_model*self_attn",
    "mistral": "*self_attn",
    "mixtral": "*self_attn",
    "starcoder2": "*self_attn",
    "granite": "*self_attn",
    "gemma": "*self_attn",
    "gemma3_text": "*self_attn",
}
FACTORIES = {"sdpa_attention": (sdpa_attention, SdpaAttention), "fused_qkv": (fused_qkv, FusedQKVAttention)}


def pair(family: str, factory: str, **settings: Any) -> tuple[Any, Any]:
    """A plain model, and its copy with the attention replaced."""
    plain = model_of(family, **settings)
    build, kind = FACTORIES[factory]
    model = swapped(plain, build, ATTENTION.get(family, "*self_attn"))
    assert sum(isinstance(module, kind) for module in model.modules()) == 2
    return plain, model


@pytest.mark.parametrize(("family", "factory"), [*itertools.product(ATTENTION, FACTORIES)])
def test_logits_and_gradients_are_the_originals(family: str, factory: str) -> None:
    assert_same(*pair(family, factory))


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral", "gemma3_text"])
def test_packed_documents_stay_apart(family: str, factory: str) -> None:
    plain, model = pair(family, factory)
    assert_same(plain, model, position_ids=PACKED)
    logits, _ = forward_backward(model, position_ids=PACKED)
    other = IDS.clone()
    other[0, :9] = 3
    changed, _ = forward_backward(model, input_ids=other, position_ids=PACKED)
    assert torch.equal(changed[0, 9:], logits[0, 9:])
    assert not torch.equal(changed[0, :9], logits[0, :9])


def test_packed_documents_are_attended_to_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = pair("llama", "sdpa_attention")
    positions = torch.tensor([[*range(4), *range(1), *range(7)], [*range(12)]])
    ids = torch.arange(24).reshape(2, 12) % 7
    assert_same(plain, model, input_ids=ids, position_ids=positions)
    calls: list[tuple[int, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((query.shape[2], kwargs.get("attn_mask") is None))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    forward_backward(model, input_ids=ids, position_ids=positions)
    assert calls == [(4, True), (1, True), (7, True), (12, True)] * 2


def test_a_mask_that_says_more_than_documents_is_obeyed() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    document = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril().bool()[None, None]
    assert packed_documents(document, positions) == [[3, 2]]
    window = document.clone()
    window[0, 0, 2, 0] = False
    assert packed_documents(window, positions) is None
    assert packed_documents(torch.where(document, 0.0, -torch.inf), positions) is None
    assert packed_documents(document, None) is None
    both = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]])
    assert packed_documents(document, both) == [[3, 2], [3, 2]]
    assert packed_documents(document, torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])) is None
    assert packed_documents(document.expand(2, 1, 5, 5), positions) is None
    assert packed_documents(torch.ones(5, 5).tril().bool()[None, None], torch.arange(5)[None]) is None


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding_is_masked_alike(family: str, factory: str) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    mask[1, 12:] = 0
    assert_same(*pair(family, factory), attention_mask=mask)


@pytest.mark.parametrize(
    ("factory", "attn"), [("sdpa_attention", "sdpa"), ("fused_qkv", "sdpa"), ("fused_qkv", "eager")]
)
def test_dropout_is_drawn_alike_in_training_and_is_off_in_evaluation(factory: str, attn: str) -> None:
    plain, model = pair("llama_dropout", factory, attn=attn)
    results = []
    for one in (plain, model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            results.append(forward_backward(one)[0])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
    assert_same(plain.eval(), model.eval())
    assert not torch.allclose(forward_backward(model.eval())[0], results[1])


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_eager_model_is_replaced_with_the_same_numbers(factory: str) -> None:
    plain, model = pair("qwen3", factory, attn="eager")
    # Another function sums in another order; these weights are wide.
    tolerance = 1e-6 if factory == "fused_qkv" else 1e-5
    assert_same(plain, model, tolerance=tolerance)
    assert_same(plain, model, tolerance=tolerance, position_ids=PACKED)


def test_fused_qkv_keeps_the_attention_weights_that_eager_returns() -> None:
    plain, model = pair("qwen3", "fused_qkv", attn="eager")
    for one, other in zip(
        plain(IDS, output_attentions=True).attentions, model(IDS, output_attentions=True).attentions, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not model(IDS).attentions


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text", "qwen3_moe"])
def test_generation_with_a_cache_is_the_same(family: str, factory: str) -> None:
    plain, model = pair(family, factory)
    assert torch.equal(generated(model), generated(plain))
    assert torch.equal(generated(model), generated(model, use_cache=False))


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_cache_may_be_filled_in_pieces_or_have_room_to_spare(factory: str) -> None:
    # In single precision the rounding of logits up to 5, which no two machines do alike, is all there is to see.
    plain, model = (one.double().eval() for one in pair("qwen3", factory))

    def pieces(one: Any, cache: Any) -> torch.Tensor:
        ends = ((0, 6), (6, 11), (11, 12), (12, 17))
        return torch.cat([one(IDS[:, start:end], cache=cache).logits for start, end in ends], dim=1)

    with torch.no_grad():
        whole = model(IDS).logits
        for make in (DynamicCache, partial(StaticCache, max_cache_len=24)):
            found = pieces(model, make(config=model.config))
            torch.testing.assert_close(found, pieces(plain, make(config=plain.config)), rtol=0, atol=1e-12)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def test_key_heads_are_shared_under_a_mask_too() -> None:
    plain, model = pair("qwen3", "sdpa_attention", num_attention_heads=8, num_key_value_heads=2)

    def kept(one: Any) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 4:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        attention = one.model.layers[0].self_attn
        states = torch.randn(2, 64, 32, requires_grad=True)
        angles = torch.zeros(1, 64, 8)
        mask = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attention(states, position_embeddings=(angles.cos(), angles.sin()), attention_mask=mask)[0].sum()
        return sum(sizes.values())

    # Keys and values of 8 copied heads, of which 2 are kept anyway.
    head = 2 * 64 * 8 * 4
    assert kept(plain) - kept(model) >= 2 * (8 - 2) * head
    assert_same(plain, model, position_ids=PACKED)


@pytest.mark.parametrize("factory", FACTORIES)
def test_bfloat16_differs_by_rounding_alone(factory: str) -> None:
    plain, model = pair("qwen3", factory, dtype=torch.bfloat16)
    logits, grads = forward_backward(plain, position_ids=PACKED)
    found, found_grads = forward_backward(model, position_ids=PACKED)
    assert found.dtype == torch.bfloat16
    exact, _ = forward_backward(plain.float(), position_ids=PACKED)
    assert (found.float() - exact).norm() <= 1.2 * (logits.float() - exact).norm()
    for name, gradient in grads.items():
        assert (found_grads[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name


REFUSED = {
    "deepseek_v3": "DeepseekV3Attention is no standard attention: lacks k_proj, q_proj, v_proj; has kv_a_layernorm",
    "gpt_oss": "GptOssAttention holds sinks beside its projections",
    "olmo2": "Olmo2Attention can't be tried out on its own",
    "qwen3_next": "Qwen3NextAttention can't be tried out on its own",
    "smollm3": "SmolLM3Attention computes something else",
    "gpt2": "GPT2Attention is no standard attention: lacks k_proj, o_proj, q_proj, v_proj; has attn_dropout, c_attn",
}


@pytest.mark.parametrize(("family", "factory"), [*itertools.product(REFUSED, FACTORIES)])
def test_other_attention_is_refused(family: str, factory: str) -> None:
    with pytest.raises(ArgumentError, match=REFUSED[family]) as caught:
        swapped(model_of(family, attn="eager"), FACTORIES[factory][0], "*attn")
    assert caught.value.hint == "narrow match to attention modules with q_proj, k_proj, v_proj and o_proj"


def test_a_soft_cap_stays_with_the_attention_function_of_the_model() -> None:
    with pytest.raises(ArgumentError, match="Gemma2Attention computes something else than softmax"):
        pair("gemma2", "sdpa_attention", attn="eager")
    assert_same(*pair("gemma2", "fused_qkv", attn="eager", attn_logit_softcapping=0.5))


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(("family", "settings"), [("seed_oss", {}), ("starcoder2", {"residual_dropout": 0.1})])
def test_dropout_after_the_projection_is_refused_unless_it_is_zero(
    factory: str, family: str, settings: dict[str, float]
) -> None:
    for attn in ("sdpa", "eager"):
        with pytest.raises(ArgumentError, match="adds something in training, such as dropout, that would be lost"):
            pair(family, factory, attn=attn, **settings)
    assert_same(*pair(family, factory, residual_dropout=0.0))


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_rate_that_only_the_config_holds_is_found(factory: str) -> None:
    class Dropping(LlamaAttention):
        def forward(
            self,
            hidden_states: Any,
            position_embeddings: Any = None,
            attention_mask: Any = None,
            cache: Any = None,
            **kwargs: Any,
        ) -> Any:
            assert apply_rotary_pos_emb is not None
            states = hidden_states, position_embeddings, attention_mask, cache
            output, weights = super().forward(*states, **kwargs)
            rate = getattr(self.config, "hidden_rate", 0.0)
            return nn.functional.dropout(output, p=rate, training=self.training), weights

    attention = copy.deepcopy(model_of("llama").model.layers[0].self_attn)
    attention.__class__ = Dropping
    build = FACTORIES[factory][0]
    build(module=attention, module_fqn="a", context=CONTEXT)
    attention.config.hidden_rate = 0.2
    with pytest.raises(ArgumentError, match="such as dropout"):
        build(module=attention, module_fqn="a", context=CONTEXT)
    attention.config.hidden_rate = [0.2]
    with pytest.raises(ArgumentError, match="LookupError: reads hidden_rate of its config"):
        build(module=attention, module_fqn="a", context=CONTEXT)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "starcoder2", "qwen3", "llama", "qwen2"])
def test_fused_qkv_hands_any_attention_function_what_the_original_does(family: str) -> None:
    heard: list[dict[str, Any]] = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        heard.append({name: one for name, one in named.items() if not isinstance(one, torch.Tensor)})
        return query.transpose(1, 2), None

    def handed(model: Any) -> list[dict[str, Any]]:
        heard.clear()
        for training in (True, False):
            model.train(training)(IDS, use_cache=False)
        return heard.copy()

    ALL_ATTENTION_FUNCTIONS["flash_attention_spy"] = spy
    try:
        plain = model_of(family, attention_dropout=0.3)
        plain.config._attn_implementation_internal = "flash_attention_spy"
        wanted = handed(plain)
        assert handed(swapped(plain, fused_qkv, "*self_attn")) == wanted
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_spy"]
    assert [one["dropout"] for one in wanted] == [0.3, 0.3, 0.0, 0.0]
    windowed = family in ("mistral", "mixtral", "starcoder2", "qwen2")
    assert any(one.get("sliding_window") for one in wanted) == windowed


@pytest.mark.parametrize("factory", FACTORIES)
def test_modules_that_are_no_attention_are_refused(factory: str) -> None:
    build = FACTORIES[factory][0]
    model = model_of("qwen3_vl")
    for name, module in (
        ("mlp", "LlamaMLP|Qwen3VLTextMLP"),
        ("input_layernorm", "RMSNorm"),
        ("self_attn.q_proj", "Linear"),
    ):
        with pytest.raises(ArgumentError, match=f"({module}) is no standard attention"):
            swapped(model, build, f"*language_model*{name}")
    with pytest.raises(ArgumentError, match="Qwen3VLVisionAttention is no standard attention: lacks"):
        swapped(model, build, "*visual*attn")


def test_sdpa_attention_refuses_a_model_whose_masks_it_would_misread() -> None:
    model = model_of("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ArgumentError, match="attn_implementation 'flex_attention'"):
        swapped(model, sdpa_attention, "*self_attn")


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama_bias"])
def test_fused_weights_are_the_originals_rows_and_go_back_bit_for_bit(family: str) -> None:
    plain, model = pair(family, "fused_qkv")
    old, new = plain.model.layers[1].self_attn, model.model.layers[1].self_attn
    transforms = new.weight_transforms()
    biased = family != "qwen3"
    assert [one.replaced for one in transforms] == [("qkv_proj.weight",), ("qkv_proj.bias",)][: 1 + biased]
    assert transforms[0].originals == ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    assert new.qkv_proj.weight.shape == (32 + 2 * 16, 32)
    assert (new.qkv_proj.bias is not None) == biased
    assert not {"q_proj", "k_proj", "v_proj"} & set(dict(new.named_children()))
    for one in transforms:
        before = {name: old.get_parameter(name).detach() for name in one.originals}
        fused = one.to_replaced(before)
        assert torch.equal(fused[one.replaced[0]], new.get_parameter(one.replaced[0]))
        back = one.to_original(fused)
        assert back.keys() == before.keys()
        assert all(torch.equal(back[name], before[name]) for name in before)
    assert pickle.loads(pickle.dumps(transforms)) == transforms


def test_fused_qkv_runs_one_product_where_three_ran() -> None:
    plain, model = pair("qwen3", "fused_qkv")

    def linears(one: Any) -> int:
        calls: list[nn.Module] = []
        attention = one.model.layers[0].self_attn
        for module in attention.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, output: calls.append(module))
        one(IDS)
        return len(calls)

    assert (linears(plain), linears(model)) == (4, 2)


def test_projections_that_can_not_be_one_are_refused() -> None:
    def attention() -> Any:
        return copy.deepcopy(model_of("qwen2").model.layers[0].self_attn)

    def refusal(module: nn.Module) -> str:
        with pytest.raises(ArgumentError) as caught:
            fused_qkv(module=module, module_fqn="attention", context=CONTEXT)
        return caught.value.message

    some_bias, some_frozen, hooked, other_class = attention(), attention(), attention(), attention()
    some_bias.k_proj.bias = None
    assert refusal(some_bias) == "only some of q_proj, k_proj, v_proj have a bias"
    some_frozen.v_proj.weight.requires_grad_(False)
    assert refusal(some_frozen) == "only some of q_proj, k_proj, v_proj are trained"
    hooked.q_proj.register_forward_hook(lambda module, args, output: None)
    assert refusal(hooked) == "q_proj, k_proj, v_proj have hooks, which one projection would not run"
    other_class.q_proj = nn.Sequential(other_class.q_proj)
    assert refusal(other_class) == "Qwen2Attention has projections that are no torch.nn.Linear"
    frozen = attention().requires_grad_(False)
    assert not fused_qkv(module=frozen, module_fqn="a", context=CONTEXT).qkv_proj.weight.requires_grad


@pytest.mark.parametrize("factory", FACTORIES)
def test_copies_and_pickles_attend_the_same(factory: str) -> None:
    _, model = pair("qwen3", factory)
    logits = model(IDS).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(IDS).logits, logits)


def test_the_modules_of_another_model_stay_as_they_were() -> None:
    other = model_of("qwen3")
    classes = {name: type(module) for name, module in other.named_modules()}
    logits, _ = forward_backward(other)
    _, model = pair("qwen3", "fused_qkv")
    forward_backward(model)
    assert {name: type(module) for name, module in other.named_modules()} == classes
    assert torch.equal(forward_backward(other)[0], logits)
