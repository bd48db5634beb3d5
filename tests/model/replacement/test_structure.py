"""What a replacement must keep: each way to lose it is an error with rule, name and difference, and nothing changes."""

from __future__ import annotations

import pytest
import torch

from hp_core import ReplacementContext, module_replacement
from hp_core.errors import InputError
from hp_core.model.replacement.structure import lost_call
from tests.model.replacement.rules import apply, rule, skeleton
from tests.model.tiny import LLAMA, LLAMA_TIED, QWEN3_MOE


def refusal(factory: str, match: str = "*.input_layernorm", config: dict = LLAMA, **arguments: object) -> str:
    model = skeleton(config)
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(InputError) as caught:
        apply(model, rule(match, factory, **arguments))
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert {problem.path for problem in caught.value.problems} == {"plan_overrides[0].replace_module"}
    return "; ".join(problem.message for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("factory", "difference"),
    [
        ("lost_parameter", "loses the parameter 'weight'"),
        ("copied_parameter", "holds a copy of the parameter 'weight', not the parameter itself"),
        ("other_dtype", "changes the dtype of the parameter 'weight' from float32 to bfloat16"),
        ("other_shape", "changes the shape of the parameter 'weight' from (32,) to (4,)"),
        ("frozen_copy", "changes requires_grad of the parameter 'weight' to False"),
        ("added_parameter", "adds the parameter 'bias'"),
        ("added_buffer", "adds the buffer 'scale'"),
        ("changes_source", "changed the module it was given"),
        ("other_call", "forward takes (x) where (hidden_states) are given in this order"),
        ("two_arguments", "forward can't be called as the original's: missing a required argument: 'scale'"),
        ("no_forward", "has no forward"),
        ("saves_more", "changes the keys of state_dict: ['eps']"),
        ("raises", "raises ValueError: no such norm"),
        ("returns_none", "the replacement is a str, not a torch.nn.Module"),
        ("returns_source", "the replacement is the very module to be replaced"),
        ("exits", "raises SystemExit: 3"),
        ("loose_tensor", "holds the tensor 'table' outside of parameters and buffers, where nothing fills it"),
        ("contains_itself", "can't be looked at: ValueError: inner is the module itself or one around it"),
        ("deep_copy", "holds a copy of the parameter 'weight'"),
    ],
)
def test_what_a_replacement_loses_is_named(factory: str, difference: str) -> None:
    message = refusal(factory)
    assert message.startswith("model.layers.0.input_layernorm (and 1 more): ")
    assert difference in message


def test_one_module_for_several_hits_is_refused() -> None:
    with pytest.raises(InputError, match=r"is the replacement of model.layers.0.input_layernorm as well"):
        apply(skeleton(LLAMA), rule("*.input_layernorm", "same_for_all"))


def test_lost_hooks_are_named() -> None:
    model = skeleton(LLAMA)
    model.model.norm.register_forward_pre_hook(lambda module, arguments: None)
    with pytest.raises(InputError, match="loses the forward pre hooks"):
        apply(model, rule("model.norm", "norm"))


def test_a_hook_on_a_submodule_is_kept_with_the_submodule_and_lost_with_it() -> None:
    model = skeleton(LLAMA)
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, arguments, output: None)
    apply(model, rule("*.0.mlp", "fused_mlp"))
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda module, arguments, output: None)
    with pytest.raises(InputError, match="loses the forward hooks of 'gate_proj'"):
        apply(model, rule("*.1.mlp", "fused_mlp"))


def test_an_argument_error_is_at_the_argument() -> None:
    model = skeleton(LLAMA)
    with pytest.raises(InputError) as caught:
        apply(model, rule("*.input_layernorm", "norm", eps=-1.0))
    (problem,) = caught.value.problems
    assert problem.path == "plan_overrides[0].replace_module.eps"
    assert problem.message == "model.layers.0.input_layernorm (and 1 more): must be positive, got -1.0"


def test_a_router_of_another_class_would_lose_the_router_logits() -> None:
    message = refusal("other_router", "*.mlp.gate", QWEN3_MOE)
    assert "would lose the model's router_logits: transformers collects them from instances of Qwen3MoeTopKR" in message


def test_a_router_under_another_name_is_still_found() -> None:
    model = skeleton(QWEN3_MOE)
    assert len(apply(model, rule("*.mlp", "renamed_router"))) == 2


def test_a_decoder_layer_of_another_class_would_lose_the_hidden_states() -> None:
    assert "would lose the model's hidden_states" in refusal("other_layer", "model.layers.?")


def test_the_same_forward_always_fits() -> None:
    class Asks(torch.nn.Module):
        def forward(self, first: int, /, second: int, *, third: int, fourth: int = 0) -> None: ...

    assert lost_call(Asks().forward, Asks().forward) is None


def test_the_training_flag_is_carried_over() -> None:
    model = skeleton(LLAMA)
    model.model.norm.eval()
    apply(model, rule("model.norm", "norm"))
    assert not model.model.norm.training


@pytest.mark.parametrize(
    ("factory", "difference"),
    [
        ("without_reset", "adds the non-persistent buffer 'table' without a method reset_buffers() that fills it"),
        ("keeps_old", "still holds the parameter 'gate_proj.weight', which its weight_transforms convert"),
        ("misses_one", "loses the parameter 'up_proj.weight'"),
        ("unknown_original", "transforms 'left_proj.weight', which the original module has not"),
        ("unknown_replaced", "transforms 'fused.weight', which the replacement has not"),
        ("twice", "transforms 'gate_proj.weight' twice"),
        ("lossy", "the round trip changes 'gate_proj.weight', 'up_proj.weight'"),
        ("wrong_shape", "forward gives 'gate_up_proj.weight' the shape (48, 64), the module has (96, 32)"),
        ("other_names", "forward gives ['fused'], declared are ['gate_up_proj.weight']"),
        ("failing", "weight_transforms raises KeyError: 'gate'"),
    ],
)
def test_wrong_transforms_are_named(factory: str, difference: str) -> None:
    assert difference in refusal(factory, "*.mlp")


def test_a_wrong_way_back_fails_the_round_trip() -> None:
    assert "the round trip changes" in refusal("fused_mlp", "*.mlp", swap=True)


def test_frozen_and_trainable_tensors_are_not_joined() -> None:
    model = skeleton(LLAMA)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"joins frozen and trainable tensors: gate_proj.weight, up_proj.weight"):
        apply(model, rule("*.mlp", "fused_mlp"))


def test_tied_weights_are_not_transformed() -> None:
    model = skeleton(LLAMA)
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    with pytest.raises(InputError, match=r"transforms the tied parameter 'gate_proj\.weight'"):
        apply(model, rule("*.mlp", "fused_mlp"))


def test_a_tie_is_kept_by_the_object() -> None:
    model = skeleton(LLAMA_TIED)
    apply(model, rule("model.norm", "norm"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_new_tensors_are_made_like_the_model() -> None:
    model = skeleton({**LLAMA, "dtype": "bfloat16"}).to(torch.bfloat16)
    apply(model, rule("*.mlp", "fused_mlp"))
    weight = model.model.layers[0].mlp.gate_up_proj.weight
    assert (weight.dtype, weight.device.type) == (torch.bfloat16, "meta")
    assert torch.get_default_dtype() == torch.float32


def test_a_factory_declares_what_it_is_given() -> None:
    with pytest.raises(TypeError, match="half must declare module_fqn, context"):

        @module_replacement
        def half(module: object) -> None: ...

    with pytest.raises(TypeError, match=r"open must declare its arguments by name, without \*\*kwargs"):

        @module_replacement
        def open(module: object, module_fqn: str, context: ReplacementContext, **rest: object) -> None: ...
