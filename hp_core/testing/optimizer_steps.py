"""An optimizer under test: built on a tiny model, stepped on made-up gradients, saved and restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from hp_core.checkpoint.layout import as_checkpoint
from hp_core.checkpoint.saver import Contents, save_checkpoint
from hp_core.checkpoint.store import load_checkpoint, optimizer_names
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import require, whole
from hp_core.testing.models import tiny_model
from hp_core.training.built import as_optimizer
from hp_core.training.protocols import parts_of


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer under test: the component with its recipe arguments, and the family of the tiny model."""

    component: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    family: str = "llama"
    tolerance: float = 1e-4
    directory: str = ""

    def model(self, seed: int = 0, setup: DistributedSetup | None = None) -> nn.Module:
        """The model, sharded over the ranks of `setup` if there are several.

        Norms start at one and biases at zero, where a decay of half of them would not show; all are moved by 0.5.
        """
        model = tiny_model(self.family, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
        if setup is not None:
            shard_model(model, setup)
        return model

    def build(self, model: nn.Module) -> Optimizer:
        """The torch optimizer, as the engine gets it."""
        return as_optimizer(self.component(**self.arguments, model=model))

    def decaying(self) -> OptimizerCase | None:
        """The same with a weight decay, or None where it takes no `weight_decay`."""
        if "weight_decay" not in inspect.signature(self.component).parameters:
            return None
        return replace(self, arguments={**self.arguments, "weight_decay": self.arguments.get("weight_decay") or 0.1})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole copies of the parameters by name."""
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def contents(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Whole copies of the parameters and of everything the optimizer remembers about them."""
    found: dict[str, Any] = weights(model)
    for part in parts_of(optimizer):
        for name, parameter in model.named_parameters():
            for key, value in part.state.get(parameter, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                found[f"{key} of {name}"] = whole(value.detach()).clone() if is_tensor else value
    return found


def set_gradients(model: nn.Module, seed: int | None) -> None:
    """Give each trainable parameter a gradient of normal numbers from `seed`, of zeros for None.

    They are of full rank and the same for any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed or 0)
    for parameter in model.parameters():
        gradient = torch.zeros(parameter.shape)
        if seed is not None:
            gradient = torch.randn(parameter.shape, generator=generator) * 0.1
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient


def take_steps(model: nn.Module, optimizer: Optimizer, seeds: Iterable[int]) -> None:
    """A step for each seed, with its gradients."""
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def save(path: str | Path, model: nn.Module, optimizer: Optimizer, setup: DistributedSetup) -> Path:
    """Write a checkpoint as a run does it."""
    parts = parts_of(optimizer)
    state = {"optimizers": optimizer_names(parts), "world_size": setup.world_size}
    contents = Contents(2, model, nn.Module(), parts, trainer_state=state, manifest={})
    return save_checkpoint(Path(path), contents, setup)


def load(path: Path, model: nn.Module, optimizer: Optimizer, setup: DistributedSetup) -> None:
    """Restore a checkpoint as a run does it."""
    checkpoint = as_checkpoint(path)
    assert checkpoint is not None
    parts = parts_of(optimizer)
    load_checkpoint(checkpoint, model=model, loss_fn=nn.Module(), optimizers=parts, seed=0, setup=setup)


def interrupted_and_not(case: OptimizerCase, setup: DistributedSetup) -> tuple[dict[str, Any], dict[str, Any]]:
    """What four steps give, with a checkpoint after two and without, sharded as `setup` is.

    The interrupted run goes on in a model of other weights with an optimizer built anew.
    """
    model = case.model(setup=setup)
    optimizer = case.build(model)
    take_steps(model, optimizer, range(1, 3))
    path = save(case.directory, model, optimizer, setup)
    take_steps(model, optimizer, range(3, 5))
    again = case.model(seed=1, setup=setup)
    restored = case.build(again)
    load(path, again, restored, setup)
    take_steps(again, restored, range(3, 5))
    return contents(again, restored), contents(model, optimizer)


def require_unmoved(
    model: nn.Module, before: Mapping[str, torch.Tensor], what: str, hint: str, only: Iterable[str] | None = None
) -> None:
    """Compare weights with earlier ones, bit for bit.

    Raises:
        BrokenPromiseError: `what`, and the first that has moved.
    """
    after = weights(model)
    for name in before if only is None else only:
        if not torch.equal(after[name], before[name]):
            by = float((after[name] - before[name]).abs().max())
            require(False, f"{what} {name} by up to {by:.3g}; {hint}")
