"""Layers that are run again in the backward pass, on every layout, against one process that keeps everything."""

from dataclasses import replace
from functools import cache

import pytest

from hp_core.testing.ranks import RankError
from tests.equivalence.layouts import Case, Found, Layout, assert_same, found_on

LAYOUTS = {
    "two micro-batches": Layout(1, num_micro_batches=2),
    "fsdp2": Layout(2),
    "fsdp2, kept gathered": Layout(2, fsdp={"reshard_after_forward": False}, num_micro_batches=2),
    "fsdp2, gathered ahead": Layout(2, fsdp={"forward_prefetch": 1, "backward_prefetch": 2}),
    "tp2, sequence parallel": Layout(2, {"tp_size": 2, "sequence_parallel": True}),
    "cp2, ring": Layout(2, {"cp_size": 2, "cp_method": "ring"}),
    "cp2": Layout(2, {"cp_size": 2}),
    "ep2": Layout(2, {"ep_size": 2}),
    "pp2": Layout(2, {"pp_size": 2}, num_micro_batches=2),
    "pp2, zero bubble": Layout(2, {"pp_size": 2, "pp_schedule": "zbv_zero_bubble"}, num_micro_batches=4),
    "fsdp2 x tp2": Layout(4, {"tp_size": 2}),
}


@cache
def alone() -> Found:
    return found_on(case(), Layout())


def case() -> Case:
    return Case("qwen3_moe", config={"num_hidden_layers": 4})


# What `selective` is refused with (hp_core.config.memory.checkpoint_conflicts).
FULL_ALONE = ("cp2, ring", "pp2, zero bubble")


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in LAYOUTS for mode in ("full", "selective") if mode == "full" or name not in FULL_ALONE],
)
def test_gradients_are_those_of_one_process(name: str, mode: str) -> None:
    layout = LAYOUTS[name]
    recomputed = Layout(layout.num_ranks, layout.accelerator, layout.fsdp, layout.num_micro_batches, mode)
    assert_same(found_on(case(), recomputed), alone())


TP2, EP2 = {"tp_size": 2}, {"ep_size": 2}
# Where ranks share the work of what is computed again by itself.
WITHIN = {
    "tp2": Layout(2, TP2, modules=["*.mlp", "*.self_attn"]),
    "tp2, sequence parallel": Layout(2, {**TP2, "sequence_parallel": True}, modules=["*.mlp", "*.self_attn"]),
    "ep2": Layout(2, EP2, modules=["*.experts"]),
    "tp2 x ep2, swapped": Layout(2, {**TP2, **EP2}, modules=["*.mlp", "*.self_attn"], swapping=True),
    "head": Layout(2, TP2, modules=["lm_head", "*.embed_tokens"]),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_so_they_are_where_ranks_share_what_is_computed_again(name: str, mode: str) -> None:
    assert_same(found_on(case(), replace(WITHIN[name], checkpointing=mode)), alone())


def test_a_projection_that_is_computed_again_by_itself_is_not_shared() -> None:
    wanted = "layers.0.self_attn: its q_proj is computed again, or swapped, by itself"
    with pytest.raises(RankError, match=wanted):
        found_on(case(), Layout(2, TP2, checkpointing="full", modules=["*.q_proj"]))
