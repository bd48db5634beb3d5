"""Layers are divided so that no other division has a cheaper costliest stage; schedules say what they take."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.model.tiny import tiny_config
from hp_core.parallel.pipeline.schedules import SCHEDULES
from hp_core.parallel.pipeline.split import Costs, balanced, written
from hp_core.parallel.pipeline.stages import Anatomy


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 100), st.integers(1, 5)
)
def test_no_other_division_has_a_cheaper_costliest_stage(layers, embedding, head, num_stages):
    num_stages = min(num_stages, len(layers))
    costs = Costs(embedding, tuple(layers), head)
    split = balanced(costs, num_stages)
    assert [index for stage in split for index in stage] == list(range(len(layers)))
    assert all(split)
    cheapest = min(
        max(costs.of_stage(range(start, stop)) for start, stop in zip((0, *cuts), (*cuts, len(layers)), strict=True))
        for cuts in combinations(range(1, len(layers)), num_stages - 1)
    )
    assert max(map(costs.of_stage, split)) == cheapest


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers():
    assert balanced(Costs(64, (100,) * 8, 0), 2) == [range(4), range(4, 8)]
    assert balanced(Costs(64, (100,) * 8, 400), 2) == [range(6), range(6, 8)]
    assert balanced(Costs(64, (100,) * 4, 10_000), 2) == [range(3), range(3, 4)]


def test_the_numbers_of_a_recipe_are_taken_as_they_are():
    assert written([1, 3, 2]) == [range(1), range(1, 4), range(4, 6)]


def skeleton(family, **values):
    config = tiny_config(family)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, **values}))


def test_a_token_costs_the_weights_that_it_is_multiplied_with():
    model = skeleton("llama", num_hidden_layers=3)
    costs = Anatomy.of(model).costs(model)
    layer = sum(one.numel() for one in model.model.layers[0].parameters())
    norm, head = model.model.norm.weight.numel(), model.lm_head.weight.numel()
    assert costs == Costs(model.config.hidden_size, (layer,) * 3, norm + head)


def test_of_a_mixture_the_chosen_experts_cost():
    model = skeleton("qwen3_moe")
    layer, config = model.model.layers[0], model.config
    experts = sum(one.numel() for one in layer.mlp.experts.parameters())
    others = sum(one.numel() for one in layer.parameters()) - experts
    chosen = experts * config.num_experts_per_tok // config.num_experts
    assert Anatomy.of(model).costs(model).layers[0] == others + chosen
    assert chosen < experts


@pytest.mark.parametrize(
    ("name", "pp_size", "taken"),
    [
        ("gpipe", 4, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
        ("1f1b", 4, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
        ("interleaved_1f1b", 4, {1, 2, 3, 4, 5, 6, 7, 8}),
        ("interleaved_1f1b", 2, {1, 2, 3, 4, 6, 8}),
        ("zbv_zero_bubble", 4, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
    ],
)
def test_what_a_schedule_takes(name, pp_size, taken):
    schedule = SCHEDULES[name]
    assert {number for number in range(1, 10) if schedule.takes(number, pp_size)} == taken
    assert schedule.takes(schedule.at_least(5, pp_size), pp_size)


def test_ranks_of_stages():
    loop = [SCHEDULES["interleaved_1f1b"].rank_of(stage, 3) for stage in range(6)]
    v = [SCHEDULES["zbv_zero_bubble"].rank_of(stage, 3) for stage in range(6)]
    assert loop == [0, 1, 2, 0, 1, 2]
    assert v == [0, 1, 2, 2, 1, 0]
