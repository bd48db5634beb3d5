"""What adapters drop on tensor ranks, and what the plan says of their matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_core.config.peft import PeftConfig
from hp_core.model.adapters.inject import inject_adapters
from hp_core.model.tiny import tiny_skeleton
from hp_core.parallel.plan.model_plan import plan_model
from hp_core.parallel.sizes import ParallelSizes
from hp_core.parallel.tensor.random_numbers import CommonDropout, own_random_numbers
from hp_core.testing.setups import tiny_setup


def dropped(tp_rank: int, calls: int = 2) -> list[torch.Tensor]:
    """What a rank keeps within a region, for each call of the region, twice recomputed."""
    torch.manual_seed(5)
    common, found = CommonDropout(nn.Dropout(0.5), tp_rank, "q_proj"), []
    for _ in range(calls):
        with own_random_numbers(tp_rank):
            ones = torch.ones(64, requires_grad=True)
            kept = checkpoint(common, ones, use_reentrant=False)
        torch.rand(3)
        kept.sum().backward()
        assert ones.grad is not None
        assert torch.equal(ones.grad, kept)
        found.append(kept.detach())
    return found


def test_a_common_dropout_is_alike_on_all_ranks_and_new_in_each_call() -> None:
    first, second = dropped(0), dropped(1)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(*first)
    assert 16 < int(first[0].count_nonzero()) < 48


def test_another_layer_drops_others() -> None:
    with own_random_numbers(1):
        one, other = (CommonDropout(nn.Dropout(0.5), 1, name)(torch.ones(64)) for name in ("q_proj", "k_proj"))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("tp_size", "kv"), [(2, "shard(0)"), (4, "replicate (computes 1 of 2 slices, gradient partial)")]
)
def test_matrices_lie_as_the_side_that_they_share_with_the_weight(tp_size: int, kv: str) -> None:
    with torch.device("meta"):
        model = tiny_skeleton("llama")
    config = PeftConfig(method="lora", r=4, use_dora=True, target_modules=["q_proj", "k_proj", "o_proj", "lm_head"])
    with tiny_setup() as setup:
        inject_adapters(model, config, setup)
    plan = plan_model(model, ParallelSizes(tp=tp_size)).tensors
    assert plan is not None
    said = plan.explain("model.layers.1.self_attn")
    for name, text in {
        "q_proj.base_layer.weight [32, 32]": "shard(0)",
        "q_proj.lora_A.default.weight [4, 32]": "replicate (gradient partial)",
        "q_proj.lora_B.default.weight [32, 4]": "shard(0)",
        "q_proj.lora_magnitude_vector.default.weight [32]": "shard(0)",
        "k_proj.base_layer.weight [16, 32]": kv,
        "k_proj.lora_A.default.weight [4, 32]": "replicate (gradient partial)",
        "k_proj.lora_B.default.weight [16, 4]": kv,
        "v_proj.weight [16, 32]": kv,
        "o_proj.base_layer.weight [32, 32]": "shard(1)",
        "o_proj.lora_A.default.weight [4, 32]": "shard(1)",
        "o_proj.lora_B.default.weight [32, 4]": "replicate (gradient partial)",
        "o_proj.lora_magnitude_vector.default.weight [32]": "replicate (gradient partial)",
    }.items():
        assert f"  {name}: {text}\n" in said
    assert plan.explain("lm_head").endswith("replicated: it is no plain torch.nn.Linear")
    names = {f"{one.fqn}.{plan.name}".lstrip(".") for one in plan.boundaries for plan in one.parameters}
    assert names == {name for name, _ in model.named_parameters()}
