from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hp_core import ArgumentError
from hp_plugins.replacements.rms_norm import FusedRMSNorm, rms_norm
from tests.plugins.replacing import CONTEXT, assert_same, forward_backward, generated, model_of, swapped

LAYER_NORMS = {
    "llama": "*norm",
    "llama_tied": "*norm",
    "qwen3": "*norm",
    "qwen3_moe": "*norm",
    "deepseek_v3": "*norm",
    "qwen3_vl_moe": "*language_model*norm",
    "mistral": "*norm",
    "mixtral": "*norm",
    "olmo2": "*norm",
    "gpt_oss": "*norm",
}


def replaced(module: nn.Module) -> Any:
    return rms_norm(module=module, module_fqn="norm", context=CONTEXT)


def randomised(norm: Any) -> Any:
    with torch.no_grad():
        norm.weight.copy_(torch.randn(norm.weight.shape, generator=torch.Generator().manual_seed(1)))
    return norm


@pytest.mark.parametrize("family", LAYER_NORMS)
def test_logits_and_gradients_are_the_originals(family: str) -> None:
    plain = model_of(family, attn="eager" if family == "gpt_oss" else "sdpa")
    model = swapped(plain, rms_norm, LAYER_NORMS[family])
    assert sum(isinstance(module, FusedRMSNorm) for module in model.modules()) >= 5
    assert_same(plain, model)


def test_every_norm_of_a_model_is_taken_and_stays_what_it_was() -> None:
    model = swapped(model_of("qwen3_moe"), rms_norm, "*norm")
    norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    assert len(norms) == 9
    for norm in norms.values():
        assert isinstance(norm, FusedRMSNorm)
        assert type(norm).__name__ == "FusedRMSNorm[Qwen3MoeRMSNorm]"
        assert norm.formula.eps == norm.variance_epsilon == 1e-6


def test_the_module_it_was_given_is_left_alone_and_its_parameter_is_shared() -> None:
    norm = LlamaRMSNorm(16, eps=1e-5)
    before = dict(vars(norm))
    new = replaced(norm)
    assert vars(norm) == before
    assert type(norm) is LlamaRMSNorm
    assert new.weight is norm.weight
    assert list(new.state_dict()) == ["weight"]
    assert new.extra_repr() == norm.extra_repr()


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 0.1])
def test_eps_is_the_one_that_reproduces_the_numbers(eps: float) -> None:
    class Renamed(LlamaRMSNorm):
        def __init__(self) -> None:
            super().__init__(16, eps=eps)
            # A setting that is a number as well and no eps.
            self.init_std = 0.02

    assert replaced(Renamed()).formula.eps == eps
    tiny = torch.full((1, 16), 1e-4)
    torch.testing.assert_close(replaced(Renamed())(tiny), Renamed()(tiny), rtol=1e-6, atol=0)


def test_an_eps_that_no_attribute_holds_is_not_guessed() -> None:
    class Hidden(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 2e-6)
            return self.weight * hidden_states * scale

    with pytest.raises(ArgumentError, match="computes something else"):
        replaced(Hidden(16, eps=1e-6))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, DeepseekV3RMSNorm])
def test_bfloat16_is_at_most_one_step_away_and_nearer_to_the_exact_value(kind: Any) -> None:
    norm = randomised(kind(256)).bfloat16()
    inputs = torch.randn(512, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    theirs, ours = norm(inputs), replaced(norm)(inputs)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    exact = inputs.double() * torch.rsqrt(inputs.double().pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.double()

    def error(found: torch.Tensor) -> float:
        return float(((found.detach().double() - exact) / exact).detach().abs().max())

    assert error(ours) <= 2**-8
    assert error(ours) <= error(theirs)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(LlamaRMSNorm, torch.float32), (Olmo2RMSNorm, torch.bfloat16)], ids=["widens", "keeps"]
)
def test_an_fp32_weight_and_a_bfloat16_input_give_the_original_dtype(kind: Any, dtype: torch.dtype) -> None:
    norm = randomised(kind(64))
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    theirs, ours = norm(inputs), replaced(norm)(inputs)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=0)


def test_a_bfloat16_model_is_as_near_to_fp32_as_before() -> None:
    ratios = []
    for seed in range(6):
        plain = model_of("llama", seed, dtype=torch.bfloat16)
        logits, _ = forward_backward(plain)
        found, _ = forward_backward(swapped(plain, rms_norm, "*norm"))
        exact, _ = forward_backward(plain.float())
        ratios.append(float((found.float() - exact).norm() / (logits.float() - exact).norm()))
    assert sum(ratios) / len(ratios) < 1.1


REFUSED = {
    "gemma": ("*norm", r"GemmaRMSNorm multiplies by \(1 \+ weight\)"),
    "gemma2": ("*norm", r"Gemma2RMSNorm multiplies by \(1 \+ weight\)"),
    "gemma3_text": ("*norm", r"Gemma3RMSNorm multiplies by \(1 \+ weight\)"),
    "qwen3_next": ("*layernorm", r"Qwen3NextRMSNorm multiplies by \(1 \+ weight\)"),
    "gpt2": ("*ln_?", "LayerNorm is no RMSNorm with a weight alone: it holds weight, bias"),
    "llama": ("*.mlp", "LlamaMLP is no RMSNorm with a weight alone: it holds gate_proj, up_proj, down_proj, act_fn"),
    "qwen3_moe": ("*.gate", "Qwen3MoeTopKRouter computes something else"),
    "qwen3_vl": ("*visual*norm1", "LayerNorm is no RMSNorm with a weight alone: it holds weight, bias"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_modules_are_refused(family: str) -> None:
    match, message = REFUSED[family]
    with pytest.raises(ArgumentError, match=message) as caught:
        swapped(model_of(family, attn="eager"), rms_norm, match)
    assert "narrow match" in caught.value.hint


def test_gated_norms_bare_norms_and_embeddings_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"forward takes \(hidden_states, gate\)"):
        replaced(Qwen3NextRMSNormGated(16))
    with pytest.raises(ArgumentError, match="it holds nothing"):
        replaced(nn.RMSNorm(16, elementwise_affine=False))
    with pytest.raises(ArgumentError, match="Embedding"):
        replaced(nn.Embedding(8, 16))
    with pytest.raises(ArgumentError, match="Linear"):
        replaced(nn.Linear(16, 16, bias=False))


def test_a_forward_set_on_the_instance_is_refused() -> None:
    norm = LlamaRMSNorm(16)
    norm.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match="changed already"):
        replaced(norm)


def test_a_norm_whose_class_needs_more_than_plain_settings_is_refused() -> None:
    class Configured(LlamaRMSNorm):
        def __init__(self) -> None:
            super().__init__(16)
            self.config = object()

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) if self.config else hidden_states

    with pytest.raises(ArgumentError, match=r"can't be tried out on its own .*no attribute 'config'"):
        replaced(Configured())


def test_copies_and_pickles_compute_the_same_with_weights_of_their_own() -> None:
    norm = replaced(randomised(LlamaRMSNorm(16)))
    inputs = torch.randn(3, 16)
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(copied) is type(norm)
        assert copied.weight is not norm.weight
        assert torch.equal(copied(inputs), norm(inputs))


def test_hooks_and_frozen_weights_stay() -> None:
    norm = LlamaRMSNorm(16).requires_grad_(False).eval()
    seen: list[torch.Tensor] = []
    handle = norm.register_forward_hook(lambda module, args, output: seen.append(output))
    new = replaced(norm)
    new(torch.randn(2, 16))
    assert len(seen) == 1
    assert not new.weight.requires_grad
    assert not new.training
    handle.remove()
    new(torch.randn(2, 16))
    assert len(seen) == 1


def test_nothing_random_is_drawn_and_no_default_is_changed_while_it_is_built() -> None:
    with torch.device("meta"):
        torch.manual_seed(5)
        state, norm = torch.get_rng_state(), LlamaRMSNorm(24, eps=3e-6)
        new = replaced(norm)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.empty(1).device.type == new.weight.device.type == "meta"


def test_generation_with_a_cache_is_the_same() -> None:
    plain = model_of("qwen3")
    assert torch.equal(generated(swapped(plain, rms_norm, "*norm")), generated(plain))
