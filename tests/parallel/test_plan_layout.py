"""What the plan says each rank holds: counted by hand, and against models on real ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.errors import InputError
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.plan.derive import derive_plan
from hp_core.parallel.plan.exchange import Settings
from hp_core.parallel.plan.layout import Cut, ParameterLayout, axis_sizes, coordinates_of
from hp_core.parallel.plan.model_plan import plan_model
from hp_core.parallel.sizes import ParallelSizes
from hp_core.parallel.tensor.apply import apply_plan
from hp_core.parallel.tiny import fake_setup
from hp_core.testing.ranks import run_ranks
from tests.equivalence.layouts import beyond
from tests.model.tiny import FAMILIES, a_setup, build

LAYOUTS = {
    "tp2": (2, {"tp_size": 2}, {}),
    "fsdp4": (4, {}, {}),
    "hsdp": (4, {}, {"dp_replicate_size": 2}),
    "tp2_fsdp2": (4, {"tp_size": 2}, {}),
    "cp2_fsdp2": (4, {"cp_size": 2}, {}),
    "ep2_efsdp2": (4, {"ep_size": 2}, {}),
    "ep4": (4, {"ep_size": 4}, {}),
    "pp2_fsdp2": (4, {"pp_size": 2}, {}),
    "ep2_cp2_hsdp": (4, {"ep_size": 2, "cp_size": 2}, {"dp_replicate_size": 2}),
}


# Of 2 x 25 features FSDP gives one rank 13 and one 12; of an odd vocabulary, one row more.
UNEVEN = {**FAMILIES["llama"], "intermediate_size": 50, "vocab_size": 97}
LARGE_MOE = {**FAMILIES["qwen3_moe"], "num_experts": 64, "moe_intermediate_size": 128, "hidden_size": 256}
CONFIGS = {**FAMILIES, "llama_uneven": UNEVEN, "large_moe": LARGE_MOE}


def skeleton(family):
    values = dict(CONFIGS[family])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def held(environment, family, accelerator, fsdp):
    """What this rank holds, parameter by parameter, and what the plan says that it does."""
    with a_setup(environment, accelerator=AcceleratorConfig(**accelerator), fsdp=FsdpConfig(**fsdp)) as setup:
        model = build(setup, CONFIGS[family])
        found = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            found[name] = tuple(parameter._local_tensor.shape)
        plan = plan_model(skeleton(family), setup.sizes, settings=Settings(setup.accelerator))
        coordinates = coordinates_of(setup.rank, setup.sizes)
        own = [one for one in plan.layout.parameters if coordinates["pp"] in one.pp_ranks]
        planned = {one.fqn: one.local_shape(coordinates) for one in own}
        return found, planned, plan.local_parameters(setup.rank)


@pytest.mark.parametrize(
    "case",
    beyond(
        [
            (family, layout)
            for family in ("qwen3_moe", "deepseek_v3", "llama_tied", "llama_uneven")
            for layout in LAYOUTS
            if not family.startswith("llama") or "ep" not in layout
        ],
        ("qwen3_moe", "tp2_fsdp2"),
        ("qwen3_moe", "ep2_efsdp2"),
        ("llama_uneven", "tp2_fsdp2"),
        ("llama_tied", "pp2_fsdp2"),
    ),
    ids="-".join,
)
def test_every_rank_holds_what_the_plan_says(case):
    family, layout = case
    num_ranks, accelerator, fsdp = LAYOUTS[layout]
    for found, planned, local in run_ranks(held, num_ranks, family, accelerator, fsdp):
        assert found == planned
        assert local == sum(map(prod, found.values()))


def test_a_parameter_is_cut_as_chunks_are():
    """Of 2 x 25 features three ranks have 9, 9 and 7; of five rows four have 2, 2, 1 and none."""
    one = ParameterLayout("a", (50, 4), (Cut("tp", 0, 2), Cut("fsdp", 0, 3)))
    shapes = [one.local_shape({"tp": tp, "fsdp": fsdp}) for tp in range(2) for fsdp in range(3)]
    assert shapes == [(9, 4), (9, 4), (7, 4)] * 2
    rows = ParameterLayout("b", (5,), (Cut("fsdp", 0, 4),))
    assert [rows.local_shape({"fsdp": fsdp}) for fsdp in range(4)] == [(2,), (2,), (1,), (0,)]


def test_ranks_stand_where_the_meshes_put_them():
    sizes = ParallelSizes(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)
    assert dict(axis_sizes(sizes)) == {"pp": 2, "dp_replicate": 2, "fsdp": 4, "tp": 2, "efsdp": 2, "ep": 4}
    # 25 = 16 (second stage) + 8 (second copy) + 0 * 2 (first of fsdp) + 1 (second of tp).
    assert coordinates_of(25, sizes) == {"pp": 1, "dp_replicate": 1, "fsdp": 0, "tp": 1, "efsdp": 0, "ep": 1}
    assert coordinates_of(6, sizes) == {"pp": 0, "dp_replicate": 0, "fsdp": 3, "tp": 0, "efsdp": 1, "ep": 2}
    with pytest.raises(ValueError, match="no rank 32 among 32"):
        coordinates_of(32, sizes)


def test_local_parameters_by_hand():
    """llama on tp 2 and fsdp 2: three kinds of norms (32) stay whole on `tp`, embedding and head (96 x 32) don't."""
    model = skeleton("llama")
    plan = plan_model(model, ParallelSizes(dp_shard=2, tp=2))
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32
    cut, whole = 2 * layer + 2 * 96 * 32, 5 * 32
    assert plan.total_parameters == cut + whole
    assert [plan.local_parameters(rank) for rank in range(4)] == [cut // 4 + whole // 2] * 4


def test_the_most_and_the_fewest_are_those_of_all_ranks():
    plan = plan_model(skeleton("llama"), ParallelSizes(dp_shard=5))
    local = [plan.local_parameters(rank) for rank in range(5)]
    assert (plan.layout.most_local_parameters, plan.layout.fewest_local_parameters) == (max(local), min(local))
    assert max(local) > min(local)
    assert sum(local) == plan.total_parameters


def test_experts_that_can_not_be_shared_are_refused():
    with pytest.raises(InputError, match=r"2 experts a rank, of size 32, can't be shared by 5 ranks"):
        plan_model(skeleton("qwen3_moe"), ParallelSizes(dp_shard=10, ep=2))


@pytest.mark.parametrize("accelerator", [{"tp_size": 4, "cp_size": 2}, {"ep_size": 4, "cp_size": 2}], ids=str)
@pytest.mark.parametrize("rank", [0, 300, 511])
def test_a_model_sharded_for_512_ranks_is_as_planned(accelerator, rank):
    fsdp = FsdpConfig(dp_replicate_size=2)
    with fake_setup(512, rank, accelerator=AcceleratorConfig(**accelerator), fsdp=fsdp) as setup:
        model = skeleton("large_moe")
        plan = plan_model(model, setup.sizes)
        if setup.sizes.tp > 1:
            apply_plan(model, derive_plan(model, setup.sizes.tp), setup.mesh["tp"])
        shard_model(model, setup)
        held = {name: tuple(one._local_tensor.shape) for name, one in model.named_parameters()}
    coordinates = coordinates_of(rank, setup.sizes)
    assert held == {one.fqn: one.local_shape(coordinates) for one in plan.layout.parameters}
    assert plan.local_parameters(rank) == sum(map(prod, held.values()))
