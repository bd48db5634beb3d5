"""Layers on other ranks give one process's loss and gradients, by every schedule."""

from __future__ import annotations

from functools import cache

import pytest

from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from tests.equivalence.layouts import Case, Found, Layout, assert_same, found_on

PP2 = {"pp_size": 2}
SCHEDULES = {
    "1f1b": PP2,
    "gpipe": {**PP2, "pp_schedule": "gpipe"},
    "interleaved": {**PP2, "pp_schedule": "interleaved_1f1b"},
    "interleaved zero bubble": {**PP2, "pp_schedule": "interleaved_zero_bubble"},
    "v zero bubble": {**PP2, "pp_schedule": "zbv_zero_bubble"},
}
LAYERS = {"num_hidden_layers": 4}
FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")


def case(family: str, **arguments) -> Case:
    return Case(family, config=LAYERS, **arguments)


@cache
def alone(family: str) -> Found:
    return found_on(case(family), Layout())


def beyond(*core):
    cells = [(family, schedule) for family in FAMILIES for schedule in SCHEDULES]
    cells = [cell for cell in cells if cell != ("llama_tied", "v zero bubble")]
    return [cell if cell in core else pytest.param(*cell, marks=pytest.mark.layouts) for cell in cells]


@pytest.mark.parametrize(
    ("family", "schedule"),
    beyond(("llama_tied", "1f1b"), ("qwen3_moe", "interleaved"), ("deepseek_v3", "v zero bubble"), ("qwen3", "gpipe")),
)
def test_every_gradient_is_that_of_one_process(family, schedule):
    layout = Layout(2, SCHEDULES[schedule], num_micro_batches=4)
    assert_same(found_on(case(family), layout), alone(family))


@pytest.mark.parametrize(
    ("family", "accelerator", "num_micro_batches"),
    [
        ("qwen3_moe", {**PP2, "ep_size": 2}, 2),
        pytest.param("deepseek_v3", {**PP2, "ep_size": 2}, 2, marks=pytest.mark.layouts),
        pytest.param("llama_tied", {**PP2, "tp_size": 2}, 4, marks=pytest.mark.layouts),
        pytest.param("qwen3", {**PP2, "cp_size": 2}, 4, marks=pytest.mark.layouts),
        pytest.param("llama_tied", PP2, 2, marks=pytest.mark.layouts),
        pytest.param("qwen3_moe", SCHEDULES["v zero bubble"], 2, marks=pytest.mark.layouts),
        pytest.param("qwen3_moe", SCHEDULES["interleaved zero bubble"], 2, marks=pytest.mark.layouts),
    ],
)
def test_stages_whose_layers_are_shared_in_other_ways(family, accelerator, num_micro_batches):
    layout = Layout(4, accelerator, num_micro_batches=num_micro_batches)
    assert_same(found_on(case(family), layout), alone(family))


@pytest.mark.parametrize("stages", [4])
def test_a_stage_for_each_layer(stages):
    layout = Layout(stages, {"pp_size": stages}, num_micro_batches=4)
    assert_same(found_on(case("qwen3_moe"), layout), alone("qwen3_moe"))


@pytest.mark.parametrize("layers", [(1, 3), (3, 1)])
def test_layers_where_the_recipe_puts_them(layers):
    layout = Layout(2, {**PP2, "pp_layers": layers}, num_micro_batches=2)
    assert_same(found_on(case("llama"), layout), alone("llama"))


def test_layers_that_are_gathered_again_in_backward():
    layout = Layout(4, PP2, {"reshard_after_forward": True}, num_micro_batches=2, checkpointing="full")
    assert_same(found_on(case("llama"), layout), alone("llama"))


@pytest.mark.parametrize("silent", [(0, 1), (2, 3)])
def test_rows_without_targets_add_nothing(silent):
    found = found_on(case("llama", silent=silent), Layout(2, PP2, num_micro_batches=4))
    assert_same(found, found_on(case("llama", silent=silent), Layout()))


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_of_fewer_micro_batches_than_stages(number):
    layout = Layout(4, {"pp_size": 4}, num_micro_batches=number)
    assert_same(found_on(case("llama"), layout), alone("llama"))


def test_the_chunked_loss_with_a_head_behind_another_stage_of_its_rank():
    chunked = case("llama", loss=ChunkedCausalLMLoss, arguments={"chunk_size": 5})
    assert_same(found_on(chunked, Layout(2, SCHEDULES["interleaved"], num_micro_batches=4)), alone("llama"))


def test_a_mixture_whose_model_would_return_what_its_routers_gave():
    gathers = Case("qwen3_moe", config={**LAYERS, "output_router_logits": True, "router_aux_loss_coef": 0.01})
    assert_same(found_on(gathers, Layout(2, PP2, num_micro_batches=4)), found_on(gathers, Layout()))


class Penalised(CausalLMLoss):
    """A loss with a term of the step that is made of logits, and of what all of them sum to."""

    terms_in_stages = False
    needs_statistics = True

    def step_statistics(self, *, model_output, real_tokens):
        return {"total": (model_output.logits.double().square() * real_tokens[..., None]).sum()}

    def step_terms(self, *, model_output, real_tokens, num_real_tokens, statistics):
        own = (model_output.logits.square() * real_tokens[..., None]).sum()
        return {"penalty": own * float(statistics["total"]) * 5e-5 / num_real_tokens}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_terms_of_the_step_are_made_of_the_logits_of_the_last_stage(schedule):
    penalised = case("llama", loss=Penalised)
    wanted = found_on(penalised, Layout())
    assert wanted.loss > alone("llama").loss + 1e-3
    assert_same(found_on(penalised, Layout(2, SCHEDULES[schedule], num_micro_batches=4)), wanted)


@pytest.mark.parametrize("loss", [CausalLMLoss, ChunkedCausalLMLoss])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, PP2, num_micro_batches=4),
        pytest.param(Layout(4, SCHEDULES["v zero bubble"], num_micro_batches=2), marks=pytest.mark.layouts),
        pytest.param(Layout(4, {"pp_size": 4}, num_micro_batches=4), marks=pytest.mark.layouts),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_routers_of_all_stages_are_trained_as_one(family, layout, loss):
    """The first layer of DeepSeek is dense, so that a stage may have no router at all."""
    arguments = {"router_balance": 0.5, "router_z_loss": 0.1}
    with_routers = case(family, loss=loss, arguments=arguments)
    assert_same(found_on(with_routers, layout), found_on(with_routers, Layout()))
