"""A teacher on several ranks: sharded before and after, bit for bit the same, and computing in the recipe's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from hp_core.config.models import MixedPrecisionConfig
from hp_core.parallel.fsdp import reshard, shard_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import whole
from hp_core.testing.models import take_rows, tiny_batch, tiny_model
from hp_core.testing.setups import tiny_setup
from hp_core.training import beside
from hp_plugins.losses.distillation import DistillationLoss
from tests.plugins.losses.plain import run_loss
from tests.plugins.losses.teachers import reluctant_teacher, teacher

Found = dict[str, Any]


def distilled(setup: DistributedSetup, function: str) -> Found:
    """A micro-batch on each rank, and what the teacher is before and after."""
    model = tiny_model("llama")
    shard_model(model, setup)
    loss_fn = DistillationLoss(teacher(function), kl_weight=0.5, chunk_size=5)
    built: list[Any] = []
    plain = beside.as_module
    beside.as_module = lambda *given: built.append(plain(*given)) or built[-1]
    try:
        loss_fn.bind_model(model, setup)
    finally:
        beside.as_module = plain
    (own,) = built
    before = {name: whole(one).clone() for name, one in own.state_dict().items()}
    size = 4 // setup.world_size
    batch = take_rows(tiny_batch("llama"), setup.rank * size, (setup.rank + 1) * size)
    entries = run_loss(loss_fn, model, {**batch, "use_cache": False}, {"labels": batch["labels"]})
    entries["loss"].backward()
    reshard(model)
    same = all(torch.equal(whole(one), before[name]) for name, one in own.state_dict().items())
    return {
        "sums": torch.stack(list(entries.values())).detach(),
        "is_same": same,
        "is_sharded": all(isinstance(one, DTensor) for one in own.parameters()),
        "is_frozen": all(not one.requires_grad and one.grad is None for one in own.parameters()),
        "gradients": {name: whole(one.grad).clone() for name, one in model.named_parameters() if one.grad is not None},
    }


def on_a_rank(environment: Any, function: str, param_dtype: str | None) -> Found:
    precision = MixedPrecisionConfig(param_dtype=param_dtype)
    with tiny_setup(environment, precision=precision) as setup:
        return distilled(setup, function)


@pytest.mark.parametrize(
    ("function", "param_dtype", "tolerance"),
    [
        ("tiny_teacher", None, 1e-6),
        ("reluctant_teacher", None, 1e-6),
        ("tiny_teacher", "bfloat16", 2e-2),
    ],
)
def test_two_ranks_are_one_process_and_the_teacher_is_as_before(
    hp_ranks: Callable[..., list[Found]], function: str, param_dtype: str | None, tolerance: float
) -> None:
    ranks = hp_ranks(on_a_rank, 2, function, param_dtype)
    (alone,) = hp_ranks(on_a_rank, 1, function, None)
    sums = sum(rank["sums"] for rank in ranks)
    torch.testing.assert_close(sums, alone["sums"], rtol=tolerance, atol=0)
    for rank in ranks:
        assert rank["is_same"]
        assert rank["is_sharded"]
        assert rank["is_frozen"]
        for name, wanted in alone["gradients"].items():
            atol = tolerance * float(wanted.abs().max())
            torch.testing.assert_close(rank["gradients"][name], wanted, rtol=0, atol=atol)


def test_the_reluctant_teacher_is_one() -> None:
    with tiny_setup() as setup:
        model = reluctant_teacher(distributed_setup=setup)
        with torch.no_grad():
            model(input_ids=torch.arange(4)[None], use_cache=False)
        assert all(isinstance(one, DTensor) for one in model.parameters())
