"""What else there is to sharing sequences, beside the layouts of the matrix: one process's loss and gradients too."""

from __future__ import annotations

from functools import cache

import pytest

from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from tests.equivalence.layouts import Case, Found, Layout, assert_same, beyond, found_on

FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")
METHODS = ("all_gather", "ulysses", "ring")
# Heads of queries and of keys. Of 12 and 6, each of four ranks has three and the keys of two, one of them in part.
HEADS = ((4, 4), (4, 2), (4, 1), (12, 6))


@cache
def alone(case_key: tuple) -> Found:
    return found_on(Case(**dict(case_key)), Layout())


def context(size: int, layout: str = "head_tail", method: str = "all_gather", **more: int) -> dict:
    return {"cp_size": size, "cp_layout": layout, "cp_method": method, **more}


LAYOUTS = {
    "cp2": Layout(2, context(2)),
    "cp2 contiguous": Layout(2, context(2, "contiguous")),
    "cp2 two micro-batches": Layout(2, context(2), num_micro_batches=2),
    "fsdp2 cp2": Layout(4, context(2)),
    "cp4": Layout(4, context(4)),
    "cp2 tp2": Layout(4, context(2, tp_size=2)),
}


def by(method: str, name: str) -> Layout:
    """A layout whose ranks attend in another way."""
    layout = LAYOUTS[name]
    accelerator = {**layout.accelerator, "cp_method": method}
    return Layout(layout.num_ranks, accelerator, layout.fsdp, layout.num_micro_batches, layout.checkpointing)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", beyond(FAMILIES, "llama"))
def test_passes_that_run_again_change_nothing(family, method):
    layout = Layout(2, context(2, method=method), checkpointing="full")
    assert_same(found_on(Case(family), layout), alone((("family", family),)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["cp2", *beyond(["cp2 contiguous", "cp4"])])
@pytest.mark.parametrize("length", [13, *beyond([17])])
def test_lengths_that_do_not_divide_are_padded_without_targets(length, layout, method):
    case = {"length": length}
    assert_same(found_on(Case(**case), by(method, layout)), alone(tuple(case.items())))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["cp2", *beyond(["cp2 contiguous", "cp4", "cp2 tp2"])])
@pytest.mark.parametrize("window", [3, *beyond([1, 8])])
def test_windows_reach_over_the_ranks(window, layout, method):
    """Mistral has them in every layer."""
    case = Case(config={"model_type": "mistral", "sliding_window": window})
    assert_same(found_on(case, by(method, layout)), found_on(case, Layout()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", beyond(["cp2", "cp4", "cp2 tp2"], "cp4"))
@pytest.mark.parametrize("heads", beyond(HEADS, (4, 1)), ids=str)
def test_key_heads_may_be_fewer_than_ranks(heads, layout, method):
    num_heads, num_key_heads = heads
    size = 8 * num_heads
    case = Case(config={"hidden_size": size, "num_attention_heads": num_heads, "num_key_value_heads": num_key_heads})
    assert_same(found_on(case, by(method, layout)), found_on(case, Layout()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["cp2", *beyond(["fsdp2 cp2"])])
def test_rows_without_targets_add_nothing(layout, method):
    case = {"silent": (2, 3)}
    assert_same(found_on(Case(**case), by(method, layout)), alone(tuple(case.items())))


@pytest.mark.parametrize("layout", ["cp2", "fsdp2 cp2"])
def test_the_chunked_loss_is_cut_as_well(layout):
    case = Case(loss=ChunkedCausalLMLoss, arguments={"chunk_size": 5})
    assert_same(found_on(case, LAYOUTS[layout]), alone(()))


@pytest.mark.parametrize("layout", ["cp2", "fsdp2 cp2", "cp2 two micro-batches"])
def test_router_losses_count_the_tokens_of_all_ranks(layout):
    arguments = {"router_balance": 0.1, "router_z_loss": 0.01}
    case = Case("qwen3_moe", arguments=arguments)
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))
