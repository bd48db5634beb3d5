"""Writing the checkpoints of a run, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hp_core.checkpoint.store import save_checkpoint
from hp_core.config.checkpoint import CheckpointConfig
from hp_core.parallel.setup import DistributedSetup


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds of a run after `step` steps.

    `trainer_state` and `manifest` are kept as JSON; `plugin_state` is what each plugin wants to find again.
    """

    step: int
    model: nn.Module
    loss_fn: nn.Module
    optimizers: list[Optimizer]
    trainer_state: dict[str, Any]
    manifest: dict[str, Any]
    plugin_state: dict[str, Any]


class Saver:
    """Saves a run's checkpoints. Every rank has one and calls it alike."""

    def __init__(self, run_directory: Path, settings: CheckpointConfig, setup: DistributedSetup) -> None:
        self._run_directory = run_directory
        self._settings = settings
        self._setup = setup

    def start(self, contents: Contents) -> list[Path]:
        """Save, and return the checkpoints that are complete by now and were not before.

        Raises:
            RunError: it could not be written; what was there before is untouched.
        """
        path = save_checkpoint(
            self._run_directory,
            contents.step,
            model=contents.model,
            loss_fn=contents.loss_fn,
            optimizers=contents.optimizers,
            trainer_state=contents.trainer_state,
            manifest=contents.manifest,
            setup=self._setup,
        )
        return [path]

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of a save in the background has failed; `finish` tells why."""
        return False

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of a save in the background is complete and `finish` has not been called."""
        return False

    def finish(self) -> list[Path]:
        """Wait for a save in the background, and return the checkpoints that it completed. Every rank calls it."""
        return []

    def abandon(self) -> None:
        """Let go of a save in the background without waiting for other ranks: the run has failed."""
