"""What a run is made of around the trainer: recipe, plugins, processes, directory, trackers and counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hp_core.config import Recipe, TrainerConfig
from hp_core.errors import InputError
from hp_core.observe.console import Console
from hp_core.observe.run_directory import RunDirectory
from hp_core.observe.trackers import Tracker
from hp_core.parallel.setup import DistributedSetup
from hp_core.plugins import Plugins
from hp_core.training.state import RunState


@dataclass
class Run:
    """One run as plugins see it (`run` in the observer hooks).

    `state` holds the counters and `metrics` the last logged row; `model` and `optimizer` are set once they are
    built. Trackers live on the main rank only.
    """

    recipe: Recipe
    plugins: Plugins
    setup: DistributedSetup
    directory: RunDirectory
    console: Console
    manifest: dict[str, Any]
    trackers: list[Tracker] = field(default_factory=list)
    state: RunState = field(default_factory=RunState)
    metrics: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    optimizer: Optimizer | None = None

    @property
    def config(self) -> TrainerConfig:
        """The validated recipe."""
        return self.recipe.config

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Send one row to every tracker."""
        for tracker in self.trackers:
            tracker.log(metrics)


@dataclass(frozen=True)
class Report:
    """How a run ended: steps taken, the last logged row and the last evaluation."""

    steps: int
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None


def require_same_everywhere(what: str, value: Any, setup: DistributedSetup) -> None:
    """Refuse to go on when the ranks don't agree about `value`.

    Raises:
        InputError: names the first rank that differs, and what both have.
    """
    if setup.world_size == 1:
        return
    values: list[Any] = [None] * setup.world_size
    dist.all_gather_object(values, value, group=setup.host_group)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise InputError(f"{what} differ between ranks: rank 0 has {values[0]}, rank {rank} has {other}")


def from_main(value: Any, setup: DistributedSetup) -> Any:
    """The main rank's `value`, on every rank."""
    if setup.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=setup.host_group)
    return box[0]
