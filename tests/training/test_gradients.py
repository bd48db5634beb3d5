"""The gradient norm counts each parameter once and clipping reaches the maximum exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_core.config.models import AcceleratorConfig
from hp_core.parallel.sizes import ParallelSizes
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.ranks import run_ranks
from hp_core.training.gradients import clip, norm_and_count

ALONE = SimpleNamespace(world_size=1, sizes=ParallelSizes(), device=torch.device("cpu"))


def parameters_with(*gradients: torch.Tensor) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def test_norm_and_clip_by_hand():
    parameters = parameters_with(torch.full((10,), 4.0), torch.full((15,), 4.0))
    norm, count = norm_and_count(parameters, torch.tensor(3), ALONE)
    assert norm == pytest.approx(20.0)
    assert count == 3
    clip(parameters, norm, 1.0)
    clipped, _ = norm_and_count(parameters, torch.tensor(0), ALONE)
    assert clipped == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(parameters[0].grad, torch.full((10,), 4.0 / 20))


def test_a_small_norm_is_left_alone():
    parameters = parameters_with(torch.tensor([0.3, 0.4]))
    norm, _ = norm_and_count(parameters, torch.tensor(0), ALONE)
    clip(parameters, norm, 1.0)
    clip(parameters, norm, None)
    assert torch.equal(parameters[0].grad, torch.tensor([0.3, 0.4]))


def test_no_gradients_at_all():
    assert norm_and_count([torch.nn.Parameter(torch.zeros(2))], torch.tensor(0), ALONE) == (0.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_elements_is_exact(dtype):
    """In fp32 lanes that of four million would be off by 1e-4, and by less for each of four shards."""
    gradient = torch.rand(4_000_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = float(gradient.double().norm())
    whole, _ = norm_and_count(parameters_with(gradient), torch.tensor(0), ALONE)
    shards, _ = norm_and_count(parameters_with(*gradient.chunk(4), torch.zeros(0)), torch.tensor(0), ALONE)
    assert [whole, shards] == pytest.approx([wanted] * 2, rel=1e-6)
    assert whole == pytest.approx(shards, rel=1e-8)
    assert norm_and_count(parameters_with(gradient / 0), torch.tensor(0), ALONE)[0] == float("inf")


def mixed_placements(environment):
    import torch.distributed as dist

    store = dist.TCPStore(environment.master_addr, environment.master_port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=environment.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    # Squares 9 (sharded) and 16 (replicated): 5 on every rank; counting the replica twice gives 6.403.
    sharded = distribute_tensor(torch.tensor([[2.0], [2.0], [1.0]]), mesh, [Shard(0)])
    replicated = distribute_tensor(torch.tensor([4.0]), mesh, [Replicate()])
    parameters = [torch.nn.Parameter(torch.zeros_like(value)) for value in (sharded, replicated)]
    parameters[0].grad, parameters[1].grad = sharded, replicated
    plain = torch.nn.Parameter(torch.zeros(4))
    plain.grad = torch.full((4,), 6.0)
    setup = SimpleNamespace(world_size=2, sizes=ParallelSizes(dp_shard=2), device=torch.device("cpu"))
    rank = environment.rank
    without = norm_and_count(parameters, torch.tensor(rank), setup)
    everything = [*parameters, plain]
    norm, _ = norm_and_count(everything, torch.tensor(0), setup)
    clip(everything, norm, 1.0)
    after, _ = norm_and_count(everything, torch.tensor(0), setup)
    dist.destroy_process_group()
    return without, norm, after


def test_sharded_replicated_and_plain_gradients_count_once():
    for without, norm, after in run_ranks(mixed_placements, 2):
        assert without == (pytest.approx(5.0), 1)
        assert norm == pytest.approx(13.0)
        assert after == pytest.approx(1.0, abs=1e-6)


def on_tensor_ranks(environment):
    with tiny_setup(environment, accelerator=AcceleratorConfig(tp_size=2)) as setup:
        both = setup.mesh["dp_replicate", "fsdp", "tp"]
        sharded = distribute_tensor(torch.tensor([[2.0, 2.0], [2.0, 2.0]]), both, [Replicate(), Shard(0), Shard(1)])
        by_data = distribute_tensor(torch.tensor([5.0, 0.0]), both["fsdp"], [Shard(0)])
        on_all = distribute_tensor(torch.tensor([8.0]), both, [Replicate(), Shard(0), Replicate()])
        return norm_and_count(parameters_with(sharded, by_data, on_all), torch.tensor(0), setup)


def test_tensor_ranks_count_what_they_all_hold_once():
    """Squares 16 (one element a rank), 25 (the same on two ranks) and 64."""
    for norm, _ in run_ranks(on_tensor_ranks, 4):
        assert norm == pytest.approx(105.0**0.5)
