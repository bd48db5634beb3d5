"""What else there is to sharing heads and features, beside the layouts of the matrix: one process's gradients too."""

from __future__ import annotations

from functools import cache

import pytest

from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from tests.equivalence.layouts import Case, Found, Layout, assert_same, beyond, found_on

TP2 = {"tp_size": 2}
SP = {"sequence_parallel": True}
LP = {"loss_parallel": True}
LAYOUTS = {
    "tp2": Layout(2, TP2),
    "tp2 two micro-batches": Layout(2, TP2, num_micro_batches=2),
    "fsdp2 tp2": Layout(4, TP2),
    "cp2 tp2": Layout(4, {**TP2, "cp_size": 2}),
    "tp4": Layout(4, {"tp_size": 4}),
    "tp2 sp": Layout(2, {**TP2, **SP}),
    "tp2 sp lp": Layout(2, {**TP2, **SP, **LP}),
    "tp4 sp lp": Layout(4, {"tp_size": 4, **SP, **LP}),
    "fsdp2 tp2 sp lp": Layout(4, {**TP2, **SP, **LP}),
    "cp2 tp2 sp": Layout(4, {**TP2, **SP, "cp_size": 2}),
}


@cache
def alone(family: str) -> Found:
    return found_on(Case(family), Layout())


@pytest.mark.parametrize("options", [{}, SP], ids=["tp2", "tp2 sp"])
@pytest.mark.parametrize("family", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.layouts)])
def test_passes_that_run_again_change_nothing(family, options):
    assert_same(found_on(Case(family), Layout(2, {**TP2, **options}, checkpointing="full")), alone(family))


@pytest.mark.layouts
@pytest.mark.parametrize("family", ["mistral", "olmo2", "glm4", "granite"])
@pytest.mark.parametrize("layout", ["tp2", "tp2 sp"])
def test_families_that_the_plan_was_not_made_for(family, layout):
    """OLMo 2 normalises over all heads, so that its attention stays whole; GLM-4 fuses the projections of its MLP."""
    case = Case("llama", config={"model_type": family, "pad_token_id": 0})
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2 tp2", "tp4", "tp2 sp"])
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


@pytest.mark.parametrize("layout", ["tp2", "cp2 tp2", "fsdp2 tp2 sp lp"])
def test_rows_without_targets_add_nothing(layout):
    """With FSDP one rank has no target at all."""
    case = Case(silent=(2, 3))
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2 tp2"])
def test_the_chunked_loss_reads_the_whole_head(layout):
    case = Case(loss=ChunkedCausalLMLoss, arguments={"chunk_size": 5})
    assert_same(found_on(case, LAYOUTS[layout]), alone("llama"))


UNEVEN = {"vocab_size": 97}


@pytest.mark.parametrize("family", beyond(["llama", "llama_tied"], "llama_tied"))
@pytest.mark.parametrize("layout", beyond(["tp2", "fsdp2 tp2", "tp2 sp lp", "tp4 sp lp"], "fsdp2 tp2", "tp2 sp lp"))
def test_a_vocabulary_that_does_not_divide(family, layout):
    case = Case(family, config=UNEVEN)
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))


@pytest.mark.parametrize("layout", beyond(["tp2 sp", "tp2 sp lp", "cp2 tp2 sp"], "tp2 sp"))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_sequences_that_do_not_divide(family, layout):
    """Packed documents in rows of 13 tokens: of the last part one place is empty."""
    case = Case(family, length=13)
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))


OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01}


@pytest.mark.parametrize("config", beyond([UNEVEN, {"model_type": "granite", "logits_scaling": 3.0}], UNEVEN))
@pytest.mark.parametrize("arguments", beyond([{}, OPTIONS], OPTIONS))
@pytest.mark.parametrize("loss", [CausalLMLoss, ChunkedCausalLMLoss])
def test_the_loss_of_parts_of_the_vocabulary(loss, arguments, config):
    chunks = {"chunk_size": 5} if loss is ChunkedCausalLMLoss else {}
    case = Case(loss=loss, arguments={**arguments, **chunks}, config={"pad_token_id": 0, **config})
    assert_same(found_on(case, LAYOUTS["fsdp2 tp2 sp lp"]), found_on(case, Layout()))


@pytest.mark.parametrize(
    "layout",
    beyond(["tp2", "fsdp2 tp2", "tp2 two micro-batches", "tp2 sp", "fsdp2 tp2 sp lp"], "tp2", "fsdp2 tp2 sp lp"),
)
def test_router_losses_count_each_token_once(layout):
    case = Case("qwen3_moe", arguments={"router_balance": 0.1, "router_z_loss": 0.01})
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))
