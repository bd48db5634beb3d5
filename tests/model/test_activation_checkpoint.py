import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_core import InputError
from hp_core.config.memory import ActivationCheckpointConfig
from hp_core.model.activation_checkpoint import checkpoint_activations
from tests.model.tiny import QWEN3, QWEN3_MOE, a_setup, build

CONFIG = {**QWEN3, "num_hidden_layers": 4, "attention_dropout": 0.1}
IDS = torch.arange(2 * 64).reshape(2, 64) % 61


def settings(mode: str, **values: Any) -> ActivationCheckpointConfig:
    return ActivationCheckpointConfig.model_validate({"mode": mode, **values})


def step(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """All gradients of a step, and the bytes that its forward pass keeps beside the parameters."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    hidden.float().square().mean().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found, sum(kept.values())


@pytest.fixture
def model() -> Any:
    with a_setup() as setup:
        yield build(setup, CONFIG)


def recomputed(model: Any, mode: str, **values: Any) -> tuple[Any, list[str]]:
    other = copy.deepcopy(model)
    return other, checkpoint_activations(other, settings(mode, **values))


# Of what is kept without, at least and at most; results that `selective` keeps are not among what autograd does.
SHARES = {"full": (0.0, 0.15), "selective": (0.0, 0.15), "every_n": (0.45, 0.65)}


@pytest.mark.parametrize("mode", SHARES)
def test_gradients_are_the_same_to_the_last_bit_and_less_is_kept(model: Any, mode: str) -> None:
    expected, kept = step(model)
    other, names = recomputed(model, mode, **({"n": 2} if mode == "every_n" else {}))
    gradients, less = step(other)
    layers = (1, 3) if mode == "every_n" else range(4)
    assert names == [f"model.layers.{index}" for index in layers]
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    least, most = SHARES[mode]
    assert least <= less / kept <= most, less / kept


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (torch.ops.aten.mm.default, ATTENTION)
        return func(*args, **(kwargs or {}))


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def test_selective_computes_no_product_again(model: Any) -> None:
    numbers = {}
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0  # which has another operator on the CPU
    for mode in ("off", "selective", "full"):
        other, _ = recomputed(model, mode)
        with Products() as products:
            step(other)
        numbers[mode] = products.number
    # Seven products and an attention in each layer; the last product is not needed for the backward pass.
    assert numbers["selective"] == numbers["off"]
    assert numbers["full"] == numbers["off"] + 4 * 7


def test_patterns_name_what_is_computed_again(model: Any) -> None:
    expected, kept = step(model)
    other, names = recomputed(model, "full", modules=["*.mlp", "model.layers.0.self_attn"])
    gradients, less = step(other)
    assert names == [
        "model.layers.0.self_attn",
        *(f"model.layers.{index}.mlp" for index in range(4)),
    ]
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert less < 0.8 * kept


def test_nothing_is_renamed_and_a_copy_runs_its_own_forward(model: Any) -> None:
    other, _ = recomputed(model, "full")
    assert list(other.state_dict()) == list(model.state_dict())
    twin = copy.deepcopy(other)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    gradients, _ = step(twin)
    # Those of the other's forward would be its own parameters', and this model would have none.
    assert gradients.keys() == step(model)[0].keys()
    assert not any(one.any() for one in gradients.values())


def test_without_gradients_nothing_is_kept_or_run_twice(model: Any) -> None:
    other, _ = recomputed(model, "full")
    calls = []
    other.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        other(input_ids=IDS)
    assert len(calls) == 1
    step(other)
    assert len(calls) == 3


def test_experts_are_the_same_too() -> None:
    with a_setup() as setup:
        plain = build(setup, QWEN3_MOE)
        other = build(setup, QWEN3_MOE, activation_checkpoint=settings("selective"))
    expected, kept = step(plain)
    gradients, less = step(other)
    assert less < kept
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_patterns_without_sense_are_refused_all_at_once(model: Any) -> None:
    with pytest.raises(InputError) as caught:
        recomputed(model, "full", modules=["*.mlp", "*.mpl", "model.layers"])
    first, second = caught.value.problems
    assert (first.path, second.path) == ("activation_checkpoint.modules[1]", "activation_checkpoint.modules[2]")
    assert first.message.startswith("'*.mpl' matches no module")
    assert "mlp" in first.hint
    assert second.message == "'model.layers' matches 'model.layers', a list, which has no forward pass"


def test_modules_inside_each_other_are_refused(model: Any) -> None:
    with pytest.raises(InputError) as caught:
        recomputed(model, "full", modules=["model.layers.0", "*.mlp"])
    (problem,) = caught.value.problems
    assert problem.path == "activation_checkpoint.modules"
    assert problem.message.startswith("'model.layers.0.mlp' is inside 'model.layers.0'")


def test_more_layers_than_there_are_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="of 4 modules, none is every 5th"):
        recomputed(model, "every_n", n=5)


@pytest.mark.parametrize("values", [{"mode": "every_n"}, {"mode": "full", "n": 2}, {"modules": ["*"]}, {"mode": "fll"}])
def test_settings_without_effect_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"every_n|no effect|mode"):
        ActivationCheckpointConfig.model_validate(values)
