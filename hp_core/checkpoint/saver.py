"""Writing the checkpoints of a run, one after the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hp_core.checkpoint.layout import step_directory
from hp_core.checkpoint.places import Place
from hp_core.checkpoint.rank_state import packed
from hp_core.checkpoint.snapshot import Copies, SavePlanner
from hp_core.checkpoint.tensors import model_tensors, optimizer_keys, optimizer_scalars, optimizer_tensors
from hp_core.checkpoint.writing import RankFacts, Snapshot
from hp_core.checkpoint.writing import write as write_checkpoint
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
    plugin_state: dict[str, Any] = field(default_factory=dict)


class Saver:
    """Saves a run's checkpoints, one at a time. Every rank has one and calls it alike.

    With `settings.async_save` the files are written in a thread, from copies that are made at the call; its ranks talk
    through a process group of their own, so that training goes on meanwhile.
    """

    def __init__(self, run_directory: Path, settings: CheckpointConfig, setup: DistributedSetup) -> None:
        self._run_directory = run_directory
        self._settings = settings
        self._setup = setup
        self._copies = Copies() if settings.async_save else None
        self._group = _own_group(setup) if settings.async_save else setup.host_group
        self._in_flight: _Background | None = None
        self._notes: list[str] = []

    def start(self, contents: Contents) -> list[Path]:
        """Save, and return the checkpoints that are complete by now and were not before.

        Raises:
            RunError: it could not be written, or the one before; what was there before is untouched.
        """
        completed = self.finish()
        snapshot = self._snapshot(contents)
        write = partial(write_checkpoint, snapshot, self._settings, self._group, is_copied=self._copies is not None)
        if self._copies is None:
            self._notes += write()
            return [*completed, snapshot.final]
        self._in_flight = _Background(snapshot.final, write)
        self._in_flight.start()
        return completed

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of a save in the background has failed; `finish` tells why."""
        one = self._in_flight
        return one is not None and not one.is_alive() and one.error is not None

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of a save in the background is complete and `finish` has not been called."""
        one = self._in_flight
        return one is not None and not one.is_alive() and one.error is None

    def finish(self) -> list[Path]:
        """Wait for a save in the background, and return the checkpoints that it completed. Every rank calls it.

        Raises:
            RunError: it could not be written.
        """
        one, self._in_flight = self._in_flight, None
        if one is None:
            return []
        one.join()
        if one.error is not None:
            raise one.error
        self._notes += one.notes
        return [one.path]

    def abandon(self) -> None:
        """Let go of a save in the background without waiting for other ranks: the run has failed.

        A process that is alone has nobody to wait for, and completes it.
        """
        one, self._in_flight = self._in_flight, None
        if one is not None and self._setup.world_size == 1:
            one.join()

    def take_notes(self) -> list[str]:
        """What the user should know of the saves since the last call: old checkpoints that could not be deleted."""
        notes, self._notes = self._notes, []
        return notes

    def _snapshot(self, contents: Contents) -> Snapshot:
        model, optimizers = contents.model, contents.optimizers
        tensors = {**model_tensors(model), **optimizer_tensors(model, optimizers)}
        return Snapshot(
            final=step_directory(self._run_directory, contents.step),
            planner=SavePlanner(tensors, self._copies),
            rank=self._setup.rank,
            rank_state=packed(contents.loss_fn, model, contents.plugin_state),
            facts=RankFacts(
                Place.of(self._setup), optimizer_scalars(model, optimizers), optimizer_keys(model, optimizers)
            ),
            trainer_state=_plain(contents.trainer_state),
            manifest=_plain(contents.manifest),
        )


def save_checkpoint(run_directory: Path, contents: Contents, setup: DistributedSetup) -> Path:
    """Save once, keep what is there, and return the checkpoint's directory. Every rank calls it.

    Raises:
        RunError: it could not be written; what was there before is untouched.
    """
    (path,) = Saver(run_directory, CheckpointConfig(), setup).start(contents)
    return path


class _Background(threading.Thread):
    """A save in the background. A daemon: a rank that fails must not wait for others when it ends."""

    def __init__(self, path: Path, write: Callable[[], list[str]]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.path = path
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self._write = write

    def run(self) -> None:
        """Write; the thread's owner learns of an error."""
        try:
            self.notes = self._write()
        except BaseException as error:
            self.error = error


def _own_group(setup: DistributedSetup) -> dist.ProcessGroup:
    """A group of all ranks for the thread alone: two threads can't share one."""
    timeout = setup.host_group._get_backend(torch.device("cpu")).options._timeout
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing with the original, as JSON will have it."""
    copied: dict[str, Any] = json.loads(json.dumps(value))
    return copied
