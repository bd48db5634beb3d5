"""What else there is to sharing heads and features, beside the layouts of the matrix: one process's gradients too."""

from __future__ import annotations

from functools import cache

import pytest

from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from tests.equivalence.layouts import Case, Found, Layout, assert_same, found_on

TP2 = {"tp_size": 2}
LAYOUTS = {
    "tp2": Layout(2, TP2),
    "tp2 two micro-batches": Layout(2, TP2, num_micro_batches=2),
    "fsdp2 tp2": Layout(4, TP2),
    "cp2 tp2": Layout(4, {**TP2, "cp_size": 2}),
    "tp4": Layout(4, {"tp_size": 4}),
}


@cache
def alone(family: str) -> Found:
    return found_on(Case(family), Layout())


@pytest.mark.parametrize("family", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.layouts)])
def test_passes_that_run_again_change_nothing(family):
    assert_same(found_on(Case(family), Layout(2, TP2, checkpointing=True)), alone(family))


@pytest.mark.layouts
@pytest.mark.parametrize("family", ["mistral", "olmo2", "glm4", "granite"])
def test_families_that_the_plan_was_not_made_for(family):
    """OLMo 2 normalises over all heads, so that its attention stays whole; GLM-4 fuses the projections of its MLP."""
    case = Case("llama", config={"model_type": family, "pad_token_id": 0})
    assert_same(found_on(case, LAYOUTS["tp2"]), found_on(case, Layout()))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2 tp2", "tp4"])
def test_biases_are_added_once(layout):
    case = Case("llama", config={"attention_bias": True, "mlp_bias": True})
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))


def test_latent_attention_without_a_latent_query():
    case = Case("deepseek_v3", config={"q_lora_rank": None, "attention_bias": True})
    assert_same(found_on(case, LAYOUTS["fsdp2 tp2"]), found_on(case, Layout()))


def test_shards_of_shards_that_do_not_divide():
    """Of 2 x 25 features FSDP gives one rank 13 and one 12."""
    case = Case("llama", config={"intermediate_size": 50})
    assert_same(found_on(case, LAYOUTS["fsdp2 tp2"]), found_on(case, Layout()))


@pytest.mark.parametrize("layout", ["tp2", "cp2 tp2"])
def test_rows_without_targets_add_nothing(layout):
    case = Case(silent=(2, 3))
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2 tp2"])
def test_the_chunked_loss_reads_the_whole_head(layout):
    case = Case(loss=ChunkedCausalLMLoss, arguments={"chunk_size": 5})
    assert_same(found_on(case, LAYOUTS[layout]), alone("llama"))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2 tp2", "tp2 two micro-batches"])
def test_router_losses_count_each_token_once(layout):
    case = Case("qwen3_moe", arguments={"router_balance": 0.1, "router_z_loss": 0.01})
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))
