"""Experts spread over ranks: the loss and every gradient of one process, however tokens travel."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hp_core.config.models import AcceleratorConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.fsdp import shard_model
from hp_core.testing.loss_steps import engine_step, micro_batches
from hp_core.testing.models import LLAMA, take_rows, tiny_batch, tiny_model
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from hp_core.training.loss import contract_of
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.router_probe import find_routers
from tests.equivalence.layouts import Case, Found, Layout, assert_same, found_on

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
THREE_EACH = {"num_experts": 6, "num_experts_per_tok": 3}

CASES = {
    "qwen3_moe": Case("qwen3_moe"),
    "deepseek_v3": Case("deepseek_v3"),
    "mixtral": Case("llama", config=MIXTRAL),
}
TWO = Layout(2, {"ep_size": 2})
SHARED = Layout(4, {"ep_size": 2})
FOUR = Layout(4, {"ep_size": 4})
ACROSS_CONTEXT = Layout(4, {"ep_size": 2, "cp_size": 2})
# Tensor ranks hold the same tokens, of which each sends a part.
ON_TENSORS = Layout(4, {"ep_size": 4, "tp_size": 2})


class EagerExperts(CausalLMLoss):
    """Has the model compute its experts one by one."""

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        super().bind_model(model, distributed_setup)
        model.set_experts_implementation("eager")


class OneForAll(CausalLMLoss):
    """Sends all tokens to the first expert; `eager` as above."""

    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.eager = eager

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        super().bind_model(model, distributed_setup)
        for router in find_routers(model):
            router.module.register_forward_hook(lambda _, args, output: (*output[:2], output[2] * 0))
        if self.eager:
            model.set_experts_implementation("eager")


@cache
def alone(name: str) -> Found:
    return found_on(CASES[name], Layout())


@pytest.mark.parametrize("layout", [SHARED, ON_TENSORS], ids=str)
def test_a_step_of_mixtral_is_that_of_one_process(layout: Layout) -> None:
    assert_same(found_on(CASES["mixtral"], layout), alone("mixtral"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {"ep_size": 2}, num_micro_batches=2, checkpointing="full"),
        Layout(4, {"ep_size": 2}, checkpointing="full"),
        Layout(2, {"ep_size": 2}, {"reshard_after_forward": False}, num_micro_batches=2),
        Layout(4, {"ep_size": 4, "tp_size": 2}, num_micro_batches=2, checkpointing="full"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.layouts)])
def test_micro_batches_and_passes_that_run_again_change_nothing(name: str, layout: Layout) -> None:
    assert_same(found_on(CASES[name], layout), alone(name))


@pytest.mark.parametrize("layout", [TWO, SHARED], ids=str)
def test_experts_that_are_computed_one_by_one(layout: Layout) -> None:
    assert_same(found_on(Case("qwen3_moe", loss=EagerExperts), layout), alone("qwen3_moe"))


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.layouts)])
@pytest.mark.parametrize(
    "layout", [TWO, SHARED, FOUR, Layout(4, {"ep_size": 4}, checkpointing="full"), ON_TENSORS], ids=str
)
def test_ranks_whose_experts_get_no_token_take_part(layout: Layout, eager: bool) -> None:
    case = Case("qwen3_moe", loss=OneForAll, arguments={"eager": eager})
    found, wanted = found_on(case, layout), found_on(case, Layout())
    assert_same(found, wanted)
    gradient = found.gradients["model.layers.0.mlp.experts.down_proj"]
    assert gradient[0].abs().sum() > 0
    assert gradient[1:].abs().sum() == 0


@pytest.mark.parametrize("layout", [TWO, SHARED, ACROSS_CONTEXT, ON_TENSORS], ids=str)
def test_ranks_without_targets_add_nothing(layout: Layout) -> None:
    case = Case("qwen3_moe", silent=(0, 1))
    assert_same(found_on(case, layout), found_on(case, Layout()))


def a_model(family: str) -> PreTrainedModel:
    """A model that no recipe's `causal_lm` builds on shared sequences: one that sees, one with biases and sinks."""
    if family != "gpt_oss":
        return tiny_model(family)
    values = {"num_local_experts": 4, "num_experts_per_tok": 2, **LLAMA, "model_type": family}
    config = AutoConfig.for_model(layer_types=["sliding_attention", "full_attention"], pad_token_id=0, **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def step_of(environment: ProcessEnvironment, family: str, ep_size: int) -> Found:
    with tiny_setup(environment, accelerator=AcceleratorConfig(ep_size=ep_size)) as setup:
        model, loss_fn = a_model(family), CausalLMLoss()
        shard_model(model, setup)
        batch = tiny_batch("qwen3_moe" if family == "gpt_oss" else family)
        batch["is_padding"] = torch.zeros_like(batch["labels"], dtype=torch.bool)
        size = len(batch["labels"]) // setup.dp_size
        own = take_rows(batch, setup.dp_rank * size, (setup.dp_rank + 1) * size)
        step = engine_step(model, loss_fn, micro_batches(own, 1, contract_of(loss_fn)), setup)
        return Found(step.loss, step.gradients)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gpt_oss"])
def test_other_families(family: str) -> None:
    wanted = run_ranks(step_of, 1, family, 1)[0]
    for ranks, ep_size in ((2, 2), (4, 2)):
        assert_same(run_ranks(step_of, ranks, family, ep_size)[0], wanted)


def test_experts_that_ranks_can_not_share_by_number_are_shared_by_size() -> None:
    """Three experts each for two ranks."""
    case = Case("qwen3_moe", config=THREE_EACH)
    assert_same(found_on(case, SHARED), found_on(case, Layout()))
