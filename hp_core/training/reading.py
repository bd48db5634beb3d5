"""Reading micro-batches, which a stop may end, and counting a step over all ranks, which learn of the stop thereby."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hp_core.data.order import Position, StepBatches
from hp_core.data.streaming import Cursor, StreamBatches
from hp_core.errors import noting
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepCounts, agree_on_labels, count_step
from hp_core.training.loss import LossContract
from hp_core.training.saving import Checkpointing
from hp_core.training.state import random_state, restore_random_state
from hp_core.training.stopping import StopAgreed, StopSignals, WaitEnded

# Ranks of a pipeline that agreed before each batch of an evaluation would never work at the same time.
_BATCHES_PER_STAGE = 8

T = TypeVar("T")


class StepReader:
    """Reads this rank's micro-batches of one step after the other, or ends the run at the boundary between two.

    Args:
        batches: this rank's share of the rows.
        contract: what the loss counts for.
        setup: the run's ranks.
        stop: whether this rank was asked to stop.
        checkpoints: what else the ranks have to agree on before each step.
    """

    def __init__(
        self,
        batches: StepBatches | StreamBatches,
        contract: LossContract,
        setup: DistributedSetup,
        stop: StopSignals,
        checkpoints: Checkpointing,
    ) -> None:
        self._batches = batches
        self._contract = contract
        self._setup = setup
        self._stop = stop
        self._checkpoints = checkpoints
        self._labels: tuple[str, ...] | None = None
        self._boundary = Boundary.of(batches)

    def read(self, read: Callable[[], list[MicroBatch]], position: Position) -> list[MicroBatch]:
        """What `read` returns, the micro-batches of the step at `position`; none when a stop is asked for."""
        self._boundary = Boundary.of(self._batches)
        with noting(lambda: f"reading {self._batches.told(position)}"):
            return read_or_stop(read, self._stop) or []

    def count(self, micro_batches: list[MicroBatch]) -> StepCounts:
        """Count the step over all ranks.

        Raises:
            StopAgreed: some rank was asked to stop. What reading the step has changed is as it was before.
            RunError: the ranks' micro-batches don't have the same label tensors, or a checkpoint could not be written.
        """
        self._labels = agree_on_labels(micro_batches, self._labels, self._setup) or None
        flags = self._checkpoints.flags(stop=not micro_batches or self._stop.is_asked)
        counts = count_step(micro_batches, self._contract, self._setup, labels=self._labels or (), flags=flags)
        if self._checkpoints.settle(counts.flags):
            self._boundary.go_back(self._batches)
            raise StopAgreed
        return counts


@dataclass(frozen=True)
class Boundary:
    """What reading the rows of a step changes, as it was before: random streams, and the place in streamed data."""

    random: dict[str, Any]
    cursor: Cursor | None

    @classmethod
    def of(cls, batches: StepBatches | StreamBatches) -> Boundary:
        """Where this rank stands now."""
        return cls(random_state(), batches.cursor if isinstance(batches, StreamBatches) else None)

    def go_back(self, batches: StepBatches | StreamBatches) -> None:
        """Stand there again: the rows that were read since are read anew by the run that resumes."""
        restore_random_state(self.random)
        if self.cursor is not None and isinstance(batches, StreamBatches):
            batches.cursor = self.cursor


class Stoppable(Generic[T]):
    """Reads `number` batches, or fewer: the ranks agree again and again whether any of them was asked to stop.

    Every rank iterates over as many. `is_stopped` says afterwards that there are fewer.
    """

    def __init__(self, read: Callable[[], T], number: int, stop: StopSignals, setup: DistributedSetup) -> None:
        self._read = read
        self._number = number
        self._stop = stop
        self._setup = setup
        self._stride = 1 if setup.sizes.pp == 1 else _BATCHES_PER_STAGE * setup.sizes.pp
        self.is_stopped = False

    def __iter__(self) -> Iterator[T]:
        for index in range(self._number):
            if index % self._stride:
                yield self._read()
                continue
            batch = read_or_stop(self._read, self._stop)
            self.is_stopped = self._setup.any_on_host(batch is None)
            if batch is None or self.is_stopped:
                return
            yield batch


def read_or_stop(read: Callable[[], T], stop: StopSignals) -> T | None:
    """What `read` returns, or None when a stop is asked for before it does."""
    try:
        with stop.waiting():
            return read()
    except WaitEnded:
        return None
