"""The norm of all gradients and clipping to it, on every kind of mesh that a run has, with numbers by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import whole
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from hp_core.training.gradients import clip, norm_and_count

EVERYWHERE = (Replicate(), Replicate())


@dataclass(frozen=True)
class Mesh:
    """Sizes, and what the ranks share there: along the last axes of its mesh, or of that of experts."""

    num_ranks: int
    accelerator: dict[str, Any]
    fsdp: dict[str, Any]
    shared: tuple[Placement, ...]
    experts: bool = False

    def placed(self, setup: DistributedSetup, tensor: torch.Tensor) -> torch.Tensor:
        mesh = setup.mesh["dp_replicate", "fsdp", "tp"]
        if self.experts:
            assert setup.expert_mesh is not None
            mesh = setup.expert_mesh["dp_replicate", "efsdp", "ep"]
        return distribute_tensor(tensor, mesh, self.shared, src_data_rank=None)


MESHES = {
    "fsdp": Mesh(2, {}, {}, (Replicate(), Shard(0), Replicate())),
    "hsdp": Mesh(4, {}, {"dp_replicate_size": 2}, (Replicate(), Shard(0), Replicate())),
    "tp": Mesh(2, {"tp_size": 2}, {}, (Replicate(), Replicate(), Shard(0))),
    "fsdp x tp": Mesh(4, {"tp_size": 2}, {}, (Replicate(), Shard(0), Shard(1))),
    "ep": Mesh(2, {"ep_size": 2}, {}, (Replicate(), Replicate(), Shard(0)), experts=True),
    "fsdp x ep": Mesh(4, {"ep_size": 2}, {}, (Replicate(), Shard(1), Shard(0)), experts=True),
    "cp": Mesh(2, {"cp_size": 2}, {}, (Replicate(), Shard(0), Replicate())),
}


def with_gradients(gradients: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def clipped(gradients: Sequence[torch.Tensor], setup: DistributedSetup) -> tuple[float, float, list[torch.Tensor]]:
    """The norm before clipping to 1 and after it, and the whole gradients then."""
    parameters = with_gradients(gradients)
    norm, _ = norm_and_count(parameters, torch.zeros(()), setup)
    clip(parameters, norm, 1.0)
    after, _ = norm_and_count(parameters, torch.zeros(()), setup)
    return norm, after, [whole(parameter.grad) for parameter in parameters if parameter.grad is not None]


def norms_on(environment: ProcessEnvironment, name: str) -> dict[str, tuple[float, float, list[torch.Tensor]]]:
    mesh = MESHES[name]
    sections = {"accelerator": AcceleratorConfig(**mesh.accelerator), "fsdp": FsdpConfig(**mesh.fsdp)}
    with tiny_setup(environment, **sections) as setup:
        nine = mesh.placed(setup, torch.tensor([[2.0, 0.0], [2.0, 1.0]]))
        sixteen = distribute_tensor(
            torch.tensor([4.0]), setup.mesh["dp_replicate", "fsdp"], EVERYWHERE, src_data_rank=None
        )
        # 4 x 4 of 5 is 20.
        twenty = mesh.placed(setup, torch.full((4, 4), 5.0))
        shared = mesh.placed(setup, torch.full((4, 3), 3.0**0.5))
        return {
            "replicated": clipped([nine, sixteen], setup),
            "plain": clipped([nine, torch.tensor([4.0])], setup),
            "twenty": clipped([twenty], setup),
            "mixed": clipped([shared, torch.full((4, 4), 2.0)], setup),
        }


@pytest.mark.parametrize("name", ["fsdp x tp", "fsdp x ep", *(one for one in MESHES if " x " not in one)])
def test_each_parameter_counts_once_and_clipping_reaches_the_maximum(name: str) -> None:
    """Squares 9 (shared) and 16 (held by all): 6.403 if two ranks counted the latter twice."""
    for found in run_ranks(norms_on, MESHES[name].num_ranks, name):
        assert {key: one[0] for key, one in found.items()} == {
            "replicated": pytest.approx(5.0, abs=1e-6),
            "plain": pytest.approx(5.0, abs=1e-6),
            "twenty": pytest.approx(20.0, abs=1e-6),
            "mixed": pytest.approx(10.0, abs=1e-6),
        }
        assert [one[1] for one in found.values()] == [pytest.approx(1.0, abs=1e-6)] * 4
        (gradient,) = found["twenty"][2]
        torch.testing.assert_close(gradient, torch.full((4, 4), 5 / 20))
        torch.testing.assert_close(found["mixed"][2], [torch.full((4, 3), 3.0**0.5 / 10), torch.full((4, 4), 0.2)])
        torch.testing.assert_close(
            found["replicated"][2], [torch.tensor([[2.0, 0.0], [2.0, 1.0]]) / 5, torch.tensor([0.8])]
        )


def partial_norm(environment: ProcessEnvironment) -> str:
    with tiny_setup(environment, accelerator=AcceleratorConfig(tp_size=2)) as setup:
        mesh = setup.mesh["dp_replicate", "fsdp", "tp"]
        parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()] * 3))
        parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate(), Partial()])
        try:
            norm_and_count([parameter], torch.zeros(()), setup)
        except ValueError as error:
            return str(error)
    raise AssertionError("a part was taken for the whole")


def test_a_sum_that_is_not_finished_has_no_norm() -> None:
    for found in run_ranks(partial_norm, 2):
        assert "still a partial sum" in found
