"""Muon's update of matrices and of experts is torch's, and on any ranks that of whole matrices to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.checks import whole
from hp_core.testing.models import tiny_config
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from hp_plugins.optimizers.muon import Muon
from hp_plugins.optimizers.whole_matrix import WholeMatrixMuon
from tests.model.tiny import build

NUM_STEPS = 5
SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}


class Experts(nn.Module):
    """Three experts, each with a matrix of another size of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up = nn.Parameter(torch.randn(3, 8, 6, generator=generator(0)))
        self.down = nn.Parameter(torch.randn(3, 6, 8, generator=generator(1)))
        self.scale = nn.Parameter(torch.ones(4, 2, 2))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(parameter: torch.Tensor, step: int, expert: int = 0) -> torch.Tensor:
    """Of full rank: the iteration blows rounding up where a singular value is zero."""
    return torch.randn(parameter.shape, generator=generator(10 * step + expert)) * 10.0**expert


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (7, 7)])
def test_a_matrix_moves_as_torch_s_muon_moves_it(shape: tuple[int, int], rule: Any, nesterov: bool) -> None:
    start = torch.randn(shape, generator=generator(7))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {**SETTINGS, "nesterov": nesterov, "adjust_lr_fn": rule}
    optimizers = WholeMatrixMuon([ours], **settings), torch.optim.Muon([theirs], **settings)
    for step in range(3):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient(parameter, step)
            optimizer.step()
    # The momentum is added up in another order, and its last bit can round apart in bf16.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert (ours - start).abs().max() > 0.05


def test_each_expert_is_made_orthogonal_by_itself() -> None:
    """Gradients of experts that differ a hundredfold: a common norm or product would show in the smaller ones."""
    model = Experts()
    start = model.up.detach().clone()
    matrices = [nn.Parameter(matrix.clone()) for matrix in start]
    settings = {**SETTINGS, "adjust_lr_fn": "original"}
    stack = WholeMatrixMuon([model.up], **settings)
    single = WholeMatrixMuon(matrices, **settings)
    for step in range(3):
        for expert, matrix in enumerate(matrices):
            matrix.grad = gradient(matrix, step, expert)
        model.up.grad = torch.stack([matrix.grad for matrix in matrices])
        stack.step()
        single.step()
    assert torch.equal(model.up, torch.stack(list(matrices)))
    assert (model.up - start).abs().amax((1, 2)).min() > 0.1


def test_stacks_are_known_by_the_number_of_experts() -> None:
    muon, adamw = Muon(lr=0.1, adamw_lr=0.1, model=(model := Experts())).get_optimizer().optimizers
    assert {id(p) for group in muon.param_groups for p in group["params"]} == {id(model.up), id(model.down)}
    assert [p is model.scale for group in adamw.param_groups for p in group["params"]] == [True]


def five_steps(
    environment: ProcessEnvironment | None, config: dict[str, Any], accelerator: dict[str, Any], fsdp: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The weights after five steps on given gradients, and how parameters lie that two axes share along dimension 0."""
    sections = {"accelerator": AcceleratorConfig(**accelerator), "fsdp": FsdpConfig(**fsdp)}
    with tiny_setup(environment, **sections) as setup:
        model = build(setup, config)
        optimizer = Muon(lr=0.02, adamw_lr=1e-3, model=model).get_optimizer()
        strided = set()
        for step in range(NUM_STEPS):
            for name, parameter in model.named_parameters():
                one = gradient(parameter, step)
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    one = distribute_tensor(one, mesh, placements, src_data_rank=None)
                    strided |= {name.rpartition(".layers.")[2] for p in placements if isinstance(p, _StridedShard)}
                parameter.grad = one
            optimizer.step()
        for parameter in model.parameters():
            for state in optimizer.optimizers[0].state.get(parameter, {}).values():
                # No rank holds more of the momentum than of the matrix.
                assert not isinstance(parameter, DTensor) or state.placements == parameter.placements
        return {name: whole(value).detach().clone() for name, value in model.named_parameters()}, strided


QWEN3, MOE = tiny_config("qwen3"), tiny_config("qwen3_moe")
SIX = {**MOE, "num_experts": 6}
LAYOUTS = {
    "fsdp 2": (2, MOE, {}, {}),
    "hsdp 2 x 2": (4, MOE, {}, {"dp_replicate_size": 2}),
    "fsdp 2 x tp 2": (4, QWEN3, {"tp_size": 2}, {}),
    "uneven shards of shards": (4, {**QWEN3, "intermediate_size": 50}, {"tp_size": 2}, {}),
    "ep 2": (2, MOE, {"ep_size": 2}, {}),
    "fsdp 4, ep 2": (4, MOE, {"ep_size": 2}, {}),
    "fsdp 2 x tp 2, ep 2": (4, MOE, {"tp_size": 2, "ep_size": 2}, {}),
    "experts shared by size": (4, SIX, {"ep_size": 2}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_move_as_whole_matrices_to_the_last_bit(layout: str) -> None:
    num_ranks, config, accelerator, fsdp = LAYOUTS[layout]
    wanted, _ = five_steps(None, config, {}, {})
    for found, strided in run_ranks(five_steps, num_ranks, config, accelerator, fsdp):
        different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        assert different == []
        assert ("0.self_attn.q_proj.weight" in strided) == ("tp_size" in accelerator)
