"""Sequences shared among ranks give one process's loss and gradients."""

from __future__ import annotations

from functools import cache

import pytest

from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from tests.equivalence.layouts import Case, Found, Layout, assert_same, beyond, found_on

FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")


@cache
def alone(case_key: tuple) -> Found:
    return found_on(Case(**dict(case_key)), Layout())


def context(size: int, layout: str = "head_tail") -> dict:
    return {"cp_size": size, "cp_layout": layout}


LAYOUTS = {
    "cp2": Layout(2, context(2)),
    "cp2 contiguous": Layout(2, context(2, "contiguous")),
    "cp2 two micro-batches": Layout(2, context(2), num_micro_batches=2),
    "cp2 checkpointing": Layout(2, context(2), checkpointing=True),
    "fsdp2 cp2": Layout(4, context(2)),
    "cp4": Layout(4, context(4)),
    "hsdp2 cp2": Layout(4, context(2), {"dp_replicate_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", beyond(FAMILIES, "llama"))
def test_every_gradient_is_that_of_one_process(family, layout):
    case = {"family": family}
    assert_same(found_on(Case(**case), LAYOUTS[layout]), alone(tuple(case.items())))


@pytest.mark.parametrize("layout", ["cp2", "cp2 contiguous", "cp4"])
@pytest.mark.parametrize("length", [13, 17])
def test_lengths_that_do_not_divide_are_padded_without_targets(length, layout):
    case = {"length": length}
    assert_same(found_on(Case(**case), LAYOUTS[layout]), alone(tuple(case.items())))


@pytest.mark.parametrize("layout", ["cp2", "fsdp2 cp2"])
def test_rows_without_targets_add_nothing(layout):
    case = {"silent": (2, 3)}
    assert_same(found_on(Case(**case), LAYOUTS[layout]), alone(tuple(case.items())))


@pytest.mark.parametrize("layout", ["cp2", "fsdp2 cp2"])
def test_the_chunked_loss_is_cut_as_well(layout):
    case = Case(loss=ChunkedCausalLMLoss, arguments={"chunk_size": 5})
    assert_same(found_on(case, LAYOUTS[layout]), alone(()))


@pytest.mark.parametrize("layout", ["cp2", "fsdp2 cp2", "cp2 two micro-batches"])
def test_router_losses_count_the_tokens_of_all_ranks(layout):
    arguments = {"router_balance": 0.1, "router_z_loss": 0.01}
    case = Case("qwen3_moe", arguments=arguments)
    assert_same(found_on(case, LAYOUTS[layout]), found_on(case, Layout()))
