from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hp_core import ArgumentError
from hp_plugins.replacements.gated import swiglu as product
from hp_plugins.replacements.swiglu import LeanSwiGLU, swiglu
from tests.plugins.replacing import CONTEXT, forward_backward, generated, model_of, swapped

FEED_FORWARDS = {
    "llama": "*.mlp",
    "llama_bias": "*.mlp",
    "qwen2": "*.mlp",
    "qwen3": "*.mlp",
    "mistral": "*.mlp",
    "olmo2": "*.mlp",
    "granite": "*.mlp",
    "deepseek_v3": "*.shared_experts",
    "qwen3_vl": "*language_model*.mlp",
    "qwen3_next": "*.shared_expert",
}


def an_mlp(**settings: Any) -> Any:
    return LlamaMLP(LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=40, **settings))


def replaced(module: nn.Module) -> Any:
    return swiglu(module=module, module_fqn="mlp", context=CONTEXT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FEED_FORWARDS)
def test_logits_and_gradients_have_the_bits_of_the_originals(family: str, dtype: torch.dtype) -> None:
    plain = model_of(family, dtype=dtype)
    model = swapped(plain, swiglu, FEED_FORWARDS[family])
    assert any(isinstance(module, LeanSwiGLU) for module in model.modules())
    logits, grads = forward_backward(plain)
    found, found_grads = forward_backward(model)
    assert torch.equal(found, logits)
    assert found_grads.keys() == grads.keys()
    for name, gradient in grads.items():
        assert torch.equal(found_grads[name], gradient), name


def test_a_quarter_less_of_the_intermediate_size_is_kept() -> None:
    tokens, intermediate = 32, 40
    mlp = an_mlp()

    def kept(module: Any) -> int:
        parameters = {one.data_ptr() for one in module.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = torch.randn(1, tokens, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(inputs)
        assert output.requires_grad
        return sum(sizes.values()) - inputs.untyped_storage().nbytes()

    one = tokens * intermediate * 4
    assert kept(mlp) == 4 * one
    assert kept(replaced(mlp)) == 3 * one


def test_the_product_is_the_plain_expression_with_right_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.equal(product(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(product, (gate, up))
    assert torch.autograd.gradgradcheck(product, (gate, up))
    found = torch.func.vmap(product)(gate, up)
    assert torch.equal(found, F.silu(gate) * up)


def test_projections_are_called_as_modules_with_their_parameters() -> None:
    mlp = an_mlp(mlp_bias=True)
    new = replaced(mlp)
    assert list(new.state_dict()) == list(mlp.state_dict())
    assert all(new.get_parameter(name) is parameter for name, parameter in mlp.named_parameters())
    called: list[str] = []
    for name, child in mlp.named_children():
        child.register_forward_hook(lambda module, args, output, name=name: called.append(name))
    new(torch.randn(2, 16))
    assert called == ["gate_proj", "up_proj", "down_proj"]


REFUSED = {
    "gemma": ("*.mlp", "GemmaMLP activates by GELUTanh, not SiLU"),
    "gemma2": ("*.mlp", "Gemma2MLP activates by GELUTanh, not SiLU"),
    "gpt2": ("*.mlp", "GPT2MLP is no SwiGLU feed-forward: it holds c_fc, c_proj, act, dropout"),
    "qwen3_moe": ("*.mlp", "Qwen3MoeSparseMoeBlock is no SwiGLU feed-forward: it holds experts, gate"),
    "deepseek_v3": ("*.layers.1.mlp", "DeepseekV3MoE is no SwiGLU feed-forward"),
    "mixtral": ("*.experts", "MixtralExperts is no SwiGLU feed-forward"),
    "qwen3": ("*.self_attn", "Qwen3Attention is no SwiGLU feed-forward"),
    "seed_oss": ("*.mlp", "SeedOssMLP adds something in training, such as dropout, that would be lost"),
    "qwen3_vl": ("*visual*.mlp", "Qwen3VLVisionMLP is no SwiGLU feed-forward: it holds linear_fc1, linear_fc2, act_fn"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_modules_are_refused(family: str) -> None:
    match, message = REFUSED[family]
    with pytest.raises(ArgumentError, match=message) as caught:
        swapped(model_of(family, attn="eager"), swiglu, match)
    assert "module_type" in caught.value.hint


@pytest.mark.parametrize("activation", ["relu", "gelu", "quick_gelu", "tanh"])
def test_other_activations_are_refused(activation: str) -> None:
    with pytest.raises(ArgumentError, match="not SiLU"):
        replaced(an_mlp(hidden_act=activation))


def test_a_feed_forward_that_does_something_else_is_refused() -> None:
    class Scaled(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    class Gated(LlamaMLP):
        def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)

    config = LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=40)
    with pytest.raises(ArgumentError, match="computes something else"):
        replaced(Scaled(config))
    with pytest.raises(ArgumentError, match=r"another forward: \(x, gate\)"):
        replaced(Gated(config))


def test_dropout_of_zero_is_none_and_trying_it_draws_nothing() -> None:
    plain = model_of("seed_oss", residual_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = swapped(plain, swiglu, "*.mlp")
        with pytest.raises(ArgumentError, match="dropout"):
            swapped(model_of("seed_oss", residual_dropout=0.3), swiglu, "*.mlp")
        drawn = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(forward_backward(model)[0], forward_backward(plain)[0])


def test_copies_pickles_and_generation() -> None:
    plain = model_of("llama")
    model = swapped(plain, swiglu, "*.mlp")
    logits, _ = forward_backward(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(forward_backward(copied)[0], logits)
    assert torch.equal(generated(model), generated(plain))
