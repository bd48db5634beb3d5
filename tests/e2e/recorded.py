"""A trainer that writes down what each step was made of and what it left, and that is stopped where a test wants."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hp_core.config import TrainerConfig, load_recipe
from hp_core.data.protocols import EMPTY_ROW
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.training.accounting import MicroBatch
from hp_core.training.session import train
from hp_plugins.trainers.text import TextTrainer


@dataclass(frozen=True)
class Taken:
    """A step of one rank: the rows it read, the loss of all ranks, and a hash of its weights and moments."""

    step: int
    sample_ids: tuple[int, ...]
    loss: float
    lr: float
    tokens: int
    left: str


_taken: list[Taken] = []


class RecordedTrainer(TextTrainer):
    """Sends its own process SIGUSR1 after step `stop_at`, on one rank.

    With `while_reading`, the signal comes when the rows of the next step are read. The rest of the ranks have read
    theirs by then.
    """

    def __init__(self, *, config: TrainerConfig, stop_at: int = 0, while_reading: bool = False, rank: int = 0) -> None:
        super().__init__(config=config)
        self.stop_at, self.while_reading, self.rank = stop_at, while_reading, rank
        self.read: list[MicroBatch] = []

    def _micro_batches(self, iterator: Iterator[Any], number: int) -> list[MicroBatch]:
        self.read = super()._micro_batches(iterator, number)
        if self.while_reading:
            self._stop_here()
        return self.read

    def train_step(self, iterator: Iterator[Any]) -> None:
        super().train_step(iterator)
        row = self.run.metrics
        ids = tuple(one for micro_batch in self.read for one in micro_batch.sample_ids if one != EMPTY_ROW)
        _taken.append(Taken(row["step"], ids, row["loss"], row["lr"], row["tokens"], self._left()))
        if not self.while_reading:
            self._stop_here()

    def _stop_here(self) -> None:
        if self.run.state.step == self.stop_at and self.setup.rank == self.rank:
            os.kill(os.getpid(), signal.SIGUSR1)
            # It is noted by a thread, which may come after the next boundary on a busy machine.
            while not self.stop.is_asked:
                time.sleep(0.001)

    def _left(self) -> str:
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            for one in (parameter, *(state[key] for key in sorted(state))):
                local = one.to_local() if hasattr(one, "to_local") else one
                found.update(local.detach().contiguous().numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


def sessions(environment: ProcessEnvironment, path: str, each: Sequence[Sequence[str]]) -> list[list[Taken]]:
    """Some runs of a recipe, one after the other in this rank, each with overrides of its own; returns their steps."""
    found = []
    for number, overrides in enumerate(each):
        _taken.clear()
        with _own_store(environment, number) as own:
            train(load_recipe(path, overrides), environment=own)
        found.append(list(_taken))
    return found


@contextmanager
def _own_store(environment: ProcessEnvironment, number: int) -> Iterator[ProcessEnvironment]:
    """A store of the run's own: in that of another, its process group would find old addresses."""
    shared = dist.TCPStore(environment.master_addr, environment.master_port, is_master=False)
    if environment.is_main:
        own = dist.TCPStore(environment.master_addr, 0, is_master=True, wait_for_workers=False)
        shared.set(f"session {number}", str(own.port))
    yield replace(environment, master_port=int(shared.get(f"session {number}")))
    # The main rank holds it until all have left.
    shared.add(f"left session {number}", 1)
    while environment.is_main and shared.add(f"left session {number}", 0) < environment.world_size:
        time.sleep(0.001)
