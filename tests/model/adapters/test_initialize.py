"""Adapters as `peft` makes them: what they compute, their first weights, and what of the model is trained."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hp_core.config.models import MixedPrecisionConfig
from hp_core.config.peft import PeftConfig
from hp_core.errors import InputError
from hp_core.model.adapters.layers import adapted_layers
from hp_core.model.initialize import stream
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from tests.model.tiny import GPT2, LLAMA, a_setup, build, whole

IDS = torch.arange(24).view(2, 12)
TARGETS = ["q_proj", "down_proj", "embed_tokens", "lm_head"]


def adapted(config: Any = LLAMA, dtype: str = "float32", **values: Any) -> Any:
    with a_setup() as setup:
        return build(setup, config, dtype=dtype, peft_config=PeftConfig(method="lora", **values))


def of_peft(config: Any = LLAMA, **values: Any) -> Any:
    """The library's own model around the one that a recipe without adapters trains."""
    with a_setup() as setup, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(build(setup, config), LoraConfig(task_type="CAUSAL_LM", **values))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_model_computes_what_that_of_peft_does(config: Any, use_dora: bool, use_rslora: bool) -> None:
    targets = TARGETS if config is LLAMA else ["c_attn", "c_fc"]
    saved = ["model.norm"] if config is LLAMA else ["ln_f"]
    values = {"r": 4, "lora_alpha": 12, "use_dora": use_dora, "use_rslora": use_rslora, "target_modules": targets}
    own, theirs = adapted(config, **values, modules_to_save=saved), of_peft(config, **values, modules_to_save=saved)
    states = [one.state_dict() for one in (own, theirs.base_model.model)]
    assert states[0].keys() == states[1].keys()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in states[0].items():
            if "lora_magnitude" in name:
                # Both begin with the lengths of the same weights.
                torch.testing.assert_close(tensor, states[1][name], rtol=1e-6, atol=1e-6)
            if "lora_" in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) / 4)
        theirs.base_model.model.load_state_dict(states[0])
    own.eval(), theirs.eval()
    torch.testing.assert_close(own(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-6)
    trained = [[name for name, one in model.named_parameters() if one.requires_grad] for model in (own, theirs)]
    assert trained[0] == [name.removeprefix("base_model.model.") for name in trained[1]]


@pytest.mark.parametrize("kind", [True, "gaussian", False])
def test_first_weights_are_those_of_peft_for_the_same_random_numbers(kind: Any) -> None:
    own = adapted(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=kind)
    for fqn, layer in adapted_layers(own).items():
        found = [one.detach().clone() for name, one in layer.named_parameters() if "lora_" in name]
        torch.manual_seed(stream(7, f"{fqn}.lora"))
        if kind is False:
            for one in (layer.lora_A, layer.lora_B):
                for linear in one.values():
                    linear.reset_parameters()
            for one in (layer.lora_embedding_A, layer.lora_embedding_B):
                for parameter in one.values():
                    torch.nn.init.normal_(parameter)
        else:
            layer.reset_lora_parameters("default", kind)
        wanted = [one.detach() for name, one in layer.named_parameters() if "lora_" in name]
        assert len(found) == 2
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert any(one.any() for one in found)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_lengths_are_at_first_those_of_the_weight_with_what_is_added(config: Any) -> None:
    """So DoRA begins with what LoRA computes, also where the matrices add something from the start."""
    targets = TARGETS if config is LLAMA else ["c_attn", "c_fc"]
    values = {"target_modules": targets, "init_lora_weights": False}
    lora, dora = (adapted(config, **values, use_dora=value).eval() for value in (False, True))
    torch.testing.assert_close(dora(IDS).logits, lora(IDS).logits, rtol=0, atol=1e-5)
    plain = adapted(config, target_modules=targets).eval()
    assert not torch.allclose(plain(IDS).logits, lora(IDS).logits, rtol=0, atol=1e-3)


def first_weights(environment: Any, accelerator: dict[str, Any]) -> dict[str, torch.Tensor]:
    from hp_core.config.models import AcceleratorConfig

    values = {"target_modules": [*TARGETS, "k_proj"], "use_dora": True, "modules_to_save": ["model.norm"]}
    with tiny_setup(environment, accelerator=AcceleratorConfig(**accelerator)) as setup:
        model = build(setup, LLAMA, peft_config=PeftConfig(method="lora", **values))
        return {name: whole(one).detach().clone() for name, one in model.state_dict().items()}


@pytest.mark.parametrize(("num_ranks", "accelerator"), [(2, {}), (2, {"tp_size": 2}), (4, {"tp_size": 2})])
def test_any_number_of_ranks_begins_with_the_same(num_ranks: int, accelerator: dict[str, Any]) -> None:
    (alone,) = run_ranks(first_weights, 1, {})
    (shared, *_) = run_ranks(first_weights, num_ranks, accelerator)
    assert alone.keys() == shared.keys()
    assert all(torch.equal(shared[name], alone[name]) for name in alone)


def test_the_model_s_own_weights_are_those_without_adapters() -> None:
    own = adapted(target_modules=TARGETS, modules_to_save=["model.norm"])
    with a_setup() as setup:
        plain = build(setup, LLAMA)
    state = own.state_dict()
    for name, tensor in plain.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        (found,) = (
            state[one]
            for one in (name, f"{owner}.base_layer.{leaf}", f"{owner}.modules_to_save.default.{leaf}")
            if one in state
        )
        assert torch.equal(found, tensor)
    own.eval(), plain.eval()
    torch.testing.assert_close(own(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-6)


def test_weights_are_read_from_files_of_the_plain_model(tmp_path: Any) -> None:
    with a_setup() as setup:
        plain = build(setup, LLAMA)
        plain.save_pretrained(tmp_path)
        values = {"target_modules": TARGETS, "modules_to_save": ["model.norm"], "use_dora": True}
        own = build(setup, None, pretrained=str(tmp_path), peft_config=PeftConfig(method="lora", **values))
    assert not any(one.device.type == "meta" for one in own.state_dict().values())
    own.eval(), plain.eval()
    torch.testing.assert_close(own(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_adapters_of_a_bfloat16_model_are_float32_unless_told_otherwise(autocast: bool, dtype: torch.dtype) -> None:
    own = adapted(dtype="bfloat16", use_dora=True, autocast_adapter_dtype=autocast, init_lora_weights=False)
    kinds = {(one.requires_grad, one.dtype) for one in own.parameters()}
    assert kinds == {(True, dtype), (False, torch.bfloat16)}
    own(IDS).logits.float().square().mean().backward()
    gradients = [one.grad for one in own.parameters() if one.grad is not None]
    assert {one.dtype for one in gradients} == {dtype}
    assert all(one.any() for one in gradients)


def test_modules_trained_whole_in_bfloat16_beside_float32_adapters_are_refused() -> None:
    with pytest.raises(InputError, match="they would be trained in bfloat16 beside adapters in float32"):
        adapted(dtype="bfloat16", modules_to_save=["lm_head"])
    own = adapted(dtype="bfloat16", modules_to_save=["lm_head"], autocast_adapter_dtype=False)
    assert {one.dtype for one in own.parameters()} == {torch.bfloat16}


def test_computing_in_bfloat16_keeps_adapters_in_float32() -> None:
    with tiny_setup(precision=MixedPrecisionConfig(param_dtype="bfloat16")) as setup:
        own = build(setup, LLAMA, peft_config=PeftConfig(method="lora", use_dora=True))
        own(IDS).logits.float().square().mean().backward()
    assert {one.grad.dtype for one in own.parameters() if one.requires_grad and one.grad is not None} == {torch.float32}
