from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hp_core import ArgumentError
from hp_plugins.replacements.gated import scaled_swiglu
from hp_plugins.replacements.grouped_experts import GroupedExperts, Layout, grouped_experts
from tests.plugins.replacing import (
    CONTEXT,
    PACKED,
    assert_near,
    assert_same,
    forward_backward,
    generated,
    model_of,
    swapped,
)

MIXTURES = {
    "qwen3_moe": "*.experts",
    "deepseek_v3": "*.experts",
    "qwen3_vl_moe": "*language_model*.experts",
    "mixtral": "*.experts",
    "qwen3_next": "*.experts",
}


def experts_of(
    kind: type[nn.Module] = Qwen3MoeExperts, experts: int = 6, activation: str = "silu", dtype: Any = torch.float32
) -> Any:
    """Experts of size 16 with 24 intermediate numbers and random weights, run by the class's own loop."""
    config = SimpleNamespace(
        num_experts=experts,
        moe_num_experts=experts,
        hidden_size=16,
        moe_intermediate_size=24,
        intermediate_size=24,
        hidden_act=activation,
        mlp_bias=False,
        _experts_implementation="eager",
    )
    module = kind(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.to(dtype)


def replaced(module: nn.Module) -> Any:
    return grouped_experts(module=module, module_fqn="experts", context=CONTEXT)


def routing(tokens: int, experts: int, chosen: int = 2, dtype: Any = torch.float32, seed: int = 0) -> Any:
    """Hidden states, distinct experts for each token, and weights, all with gradients where there are any."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_()
    scores = torch.rand(tokens, experts, generator=generator)
    weights, index = scores.topk(chosen, dim=-1)
    return states, index, (weights / 2).to(dtype).detach().requires_grad_()


def run(module: Any, states: Any, index: Any, weights: Any) -> list[torch.Tensor]:
    """The result and the gradients of the input, the routing weights and the parameters."""
    output = module(states, index, weights)
    scale = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    wanted = [states, weights, module.gate_up_proj, module.down_proj]
    return [output.detach(), *torch.autograd.grad((output * scale).sum(), wanted)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [Qwen3MoeExperts, AriaExperts])
def test_an_expert_that_is_elsewhere_adds_nothing(kind: Any, dtype: torch.dtype) -> None:
    module = experts_of(kind, dtype=dtype)
    states, index, weights = routing(40, 6, dtype=dtype)
    index[::3, 0] = 6
    index[4:8] = 6
    found, wanted = run(replaced(module), states, index, weights), run(module, states, index, weights)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other, tolerance)
    output, to_states, to_weights, *_ = found
    assert not output[4:8].any()
    assert not to_states[4:8].any()
    assert not to_weights[index == 6].any()
    nothing = run(replaced(module), states, torch.full_like(index, 6), weights)
    assert not any(one.any() for one in nothing)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", MIXTURES)
def test_logits_and_gradients_are_the_originals(family: str, implementation: str) -> None:
    plain = model_of(family)
    plain.set_experts_implementation(implementation)
    model = swapped(plain, grouped_experts, MIXTURES[family])
    assert any(isinstance(module, GroupedExperts) for module in model.modules())
    assert_same(plain, model)
    assert_same(plain, model, position_ids=PACKED if family != "qwen3_vl_moe" else None)


@pytest.mark.parametrize(
    ("kind", "activation"),
    [*((Qwen3MoeExperts, name) for name in ("silu", "gelu", "relu", "gelu_pytorch_tanh")), (AriaExperts, "silu")],
)
def test_any_activation_and_both_layouts(kind: Any, activation: str) -> None:
    module = experts_of(kind, activation=activation)
    new = replaced(module)
    assert new.layout == Layout(transposed=kind is AriaExperts, silu=activation == "silu")
    assert new.gate_up_proj is module.gate_up_proj
    assert new.down_proj is module.down_proj
    inputs = routing(40, 6)
    for found, wanted in zip(run(new, *inputs), run(module, *inputs), strict=True):
        assert_near(found, wanted)


def test_experts_without_tokens_have_zero_gradients() -> None:
    module = experts_of(experts=6)
    states, index, weights = routing(10, 3)
    found = run(replaced(module), states, index, weights)
    for one, wanted in zip(found, run(module, states, index, weights), strict=True):
        assert_near(one, wanted)
    assert torch.equal(found[3][3:], torch.zeros(3, 48, 16))
    assert torch.equal(found[4][3:], torch.zeros(3, 16, 24))


def test_no_token_at_all() -> None:
    output, to_states, to_weights, up, down = run(replaced(experts_of()), *routing(0, 6))
    assert output.shape == to_states.shape == (0, 16)
    assert to_weights.shape == (0, 2)
    assert not up.any()
    assert not down.any()


def test_one_expert_for_all_and_one_choice() -> None:
    module = experts_of(experts=1)
    inputs = routing(9, 1, chosen=1)
    for found, wanted in zip(run(replaced(module), *inputs), run(module, *inputs), strict=True):
        assert_near(found, wanted)


def test_a_gradient_that_is_one_number_spread_out() -> None:
    module, inputs = experts_of(), routing(20, 6)
    gradients = []
    for one in (module, replaced(module)):
        module.zero_grad()
        one(*inputs).sum().backward()
        gradients.append([module.gate_up_proj.grad.clone(), module.down_proj.grad.clone()])
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        assert_near(found, wanted)


def test_float64_agrees_with_the_loop_to_its_own_precision() -> None:
    module, inputs = experts_of(dtype=torch.float64), routing(30, 6, dtype=torch.float64)
    for found, wanted in zip(run(replaced(module), *inputs), run(module, *inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_bfloat16_is_as_near_to_fp32_as_the_original() -> None:
    module = experts_of(dtype=torch.bfloat16)
    inputs = routing(200, 6, dtype=torch.bfloat16)
    theirs, ours = run(module, *inputs), run(replaced(module), *inputs)
    assert {one.dtype for one in ours} == {torch.bfloat16}
    wide = [
        one.detach().float().requires_grad_(one.is_floating_point()) if one.is_floating_point() else one
        for one in inputs
    ]
    exact = run(copy.deepcopy(module).float(), *wide)
    for mine, original, right in zip(ours, theirs, exact, strict=True):
        assert (mine.float() - right).norm() <= 1.1 * (original.float() - right).norm()


def test_wider_routing_weights_keep_the_dtype_of_the_tokens() -> None:
    module = experts_of(dtype=torch.bfloat16)
    states, index, weights = routing(20, 6, dtype=torch.bfloat16)
    weights = weights.detach().float().requires_grad_()
    output, _, to_weights, *_ = run(replaced(module), states, index, weights)
    assert output.dtype == torch.bfloat16
    assert to_weights.dtype == torch.float32
    torch.testing.assert_close(output, run(module, states, index, weights)[0], rtol=0.05, atol=0.02)


def test_less_is_kept_for_the_backward_pass() -> None:
    tokens, chosen, size, intermediate = 256, 2, 16, 24

    def kept(implementation: str | None) -> int:
        module = experts_of()
        if implementation is None:
            module = replaced(module)
        else:
            module.config._experts_implementation = implementation
        weights = {module.gate_up_proj.data_ptr(), module.down_proj.data_ptr()}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = routing(tokens, 6, chosen)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(*inputs)
        assert output.requires_grad
        return sum(sizes.values())

    pairs = tokens * chosen * 4
    # Gathered rows, gate and up, their scaled product, the scale; transformers also keeps silu(gate) and each result.
    assert kept(None) == pairs * (size + 3 * intermediate + 1)
    assert kept("grouped_mm") == pairs * (2 * size + 4 * intermediate + 1)


def test_the_scaled_product_has_right_gradients() -> None:
    generator = torch.Generator().manual_seed(2)
    gate, up, scale = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 4), (5, 4), (5, 1))
    )
    assert torch.autograd.gradcheck(scaled_swiglu, (gate, up, scale))
    assert torch.autograd.gradgradcheck(scaled_swiglu, (gate, up, scale))


def test_repeated_runs_have_the_same_bits() -> None:
    module, inputs = replaced(experts_of()), routing(100, 6)
    first = run(module, *inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, run(module, *inputs), strict=True))


def test_sizes_that_no_grouped_product_takes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="multiples of 8, and MixtralExperts has 12, 20") as caught:
        swapped(model_of("mixtral", hidden_size=12, intermediate_size=20, head_dim=4), grouped_experts, "*.experts")
    assert "moe_intermediate_size" in caught.value.hint


REFUSED = {
    "qwen3_moe": ("*.mlp", "Qwen3MoeSparseMoeBlock holds no experts in two fused parameters: it holds experts, gate"),
    "deepseek_v3": ("*.shared_experts", "DeepseekV3MLP holds no experts in two fused parameters"),
    "gpt_oss": ("*.experts", "GptOssExperts holds no experts .* gate_up_proj_bias"),
    "llama": ("*.mlp", "LlamaMLP holds no experts in two fused parameters"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_modules_are_refused(family: str) -> None:
    match, message = REFUSED[family]
    with pytest.raises(ArgumentError, match=message) as caught:
        swapped(model_of(family, attn="eager"), grouped_experts, match)
    assert "gate_up_proj and down_proj" in caught.value.hint


def test_experts_that_compute_something_else_are_refused() -> None:
    class Clamped(Qwen3MoeExperts):
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            return super().forward(hidden_states.clamp(-0.5, 0.5), top_k_index, top_k_weights)

    class UpFirst(Qwen3MoeExperts):
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            result = torch.zeros_like(hidden_states)
            for token, (experts, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
                for expert, weight in zip(experts, weights, strict=True):
                    up, gate = (hidden_states[token] @ self.gate_up_proj[expert].T).chunk(2)
                    result[token] += weight * (self.act_fn(gate) * up @ self.down_proj[expert].T)
            return result

    for kind in (Clamped, UpFirst):
        with pytest.raises(ArgumentError, match="computes something else"):
            replaced(experts_of(kind))


def test_copies_pickles_and_generation() -> None:
    plain = model_of("qwen3_moe")
    model = swapped(plain, grouped_experts, "*.experts")
    logits, _ = forward_backward(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(forward_backward(copied)[0], logits)
    assert torch.equal(generated(model), generated(plain))
