"""Validate mode: derived plans pass, wrong ones are named, and what can't be checked is said."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.llama.modeling_llama import LlamaMLP

from hp_core.errors import InputError
from hp_core.parallel.plan.contract import contracts_of
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.validate import validate_plan
from hp_core.parallel.sizes import ParallelSizes
from hp_core.testing.models import tiny_batch, tiny_model
from tests.equivalence.layouts import beyond
from tests.parallel.test_plan_contract import CUT_HEAD, ROWS, entry


def validated(family="llama", *overrides, model=None):
    model = model if model is not None else tiny_model(family)
    inputs = {name: value for name, value in tiny_batch(family).items() if name != "labels"}
    plan = derive_plan(model, 2, contracts_of(model, overrides, ParallelSizes(tp=2)))
    return validate_plan(model, plan, inputs)


@pytest.mark.parametrize("family", beyond(["llama", "qwen3", "qwen3_moe", "gemma2"], "llama", "qwen3"))
def test_derived_plans_are_what_propagates(family):
    before = {name: one.clone() for name, one in tiny_model(family).named_parameters()}
    model = tiny_model(family)
    assert validated(family, model=model) == ()
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_contracts_are_checked_alike():
    assert validated("llama", CUT_HEAD) == ()
    assert validated("llama", ROWS) == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            entry("lm_head", params={"weight": {"tp": "shard(0)"}}, out_src={"tp": "partial"}),
            "plan_overrides: lm_head: its output is planned as partial, and computed it is shard(2); "
            "write out_src: {tp: shard(2)}, or other params",
        ),
        (
            entry("*.0.mlp", out_src={"tp": "shard(-1)"}),
            "plan_overrides: model.layers.0.mlp: the output of down_proj is planned as shard(-1), and computed it is "
            "partial; write out_src: {tp: partial}, or other params",
        ),
    ],
)
def test_a_wrong_output_is_named_with_what_is_expected_and_found(override, message):
    with pytest.raises(InputError) as caught:
        validated("llama", override)
    assert [str(one) for one in caught.value.problems] == [message]


class Places(nn.Module):
    """Looks features up, in a way that DTensor knows nothing of."""

    def forward(self, x):
        return torch.searchsorted(x, x) * x


def test_an_operator_that_knows_no_placements_is_named():
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = Places()
    (found,) = validated("llama", model=model)
    assert (found.fqn, found.reason) == ("model.layers.0.mlp", "aten.searchsorted.Tensor can't be dispatched")


def test_a_process_group_of_another_size_is_refused():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(
            InputError, match="the plan is for 2 tensor ranks, and the process group has 4; validate it"
        ):
            validated("llama")
    finally:
        torch.distributed.destroy_process_group()


def test_the_arguments_of_a_decorated_forward_are_known_by_name():
    def logged(forward):
        @functools.wraps(forward)
        def call(*args, **kwargs):
            return forward(*args, **kwargs)

        return call

    class Logged(LlamaMLP):
        forward = logged(LlamaMLP.forward)

    model = tiny_model("llama")
    model.model.layers[0].mlp.__class__ = Logged
    override = entry(
        "*.0.mlp",
        params={f"{name}_proj.weight": {"tp": "replicate"} for name in ("gate", "up", "down")},
        in_src={"x": {"tp": "replicate"}},
        in_dst={"x": {"tp": "shard(1)"}},
        out_src={"tp": "shard(1)"},
    )
    assert validated("llama", override, model=model) == ()
