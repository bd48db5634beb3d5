"""A tiny model with an optimizer that has taken a step, as the contents of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hp_core.checkpoint.layout import Checkpoint, as_checkpoint
from hp_core.checkpoint.saver import Contents
from hp_core.checkpoint.store import Restored, load_checkpoint, optimizer_names
from hp_core.config.checkpoint import CheckpointConfig
from hp_core.parallel.setup import DistributedSetup
from tests.model.tiny import LLAMA, build, whole


def settings(**values: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"save_every": 1, **values})


class Trained:
    """A model and AdamW, which change in place with each step."""

    def __init__(self, setup: DistributedSetup, config: dict[str, Any] = LLAMA, *, steps: int = 1) -> None:
        self.setup = setup
        self.model = build(setup, config)
        self.loss_fn: torch.nn.Module = torch.nn.Module()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for _ in range(steps):
            self.take_step()

    def take_step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = (parameter.detach() * 3 + 0.01).square()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def contents(self, step: int = 1, **values: Any) -> Contents:
        state = {"optimizers": optimizer_names([self.optimizer]), "state": {"step": step}}
        state |= values.pop("trainer_state", {})
        return Contents(step, self.model, self.loss_fn, [self.optimizer], state, {"step": step}, **values)

    def load(self, path: Path) -> Restored:
        parts = {"model": self.model, "loss_fn": self.loss_fn, "optimizers": [self.optimizer]}
        return load_checkpoint(checkpoint_at(path), **parts, seed=3, setup=self.setup)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments, whole."""
        found = {name: whole(one.detach()).clone() for name, one in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = (
                    whole(value).clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
                )
        return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def checkpoint_at(path: Path) -> Checkpoint:
    checkpoint = as_checkpoint(Path(path))
    assert checkpoint is not None
    return checkpoint
