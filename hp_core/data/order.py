"""The one global order of training rows, and how each step's rows are dealt to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_core.data.mixture import Mixture
from hp_core.data.protocols import EMPTY_ROW
from hp_core.data.shuffling import shuffled
from hp_core.errors import InputError, Problem


@dataclass(frozen=True)
class Position:
    """How far a run has read: rows consumed over the run, the current epoch, and rows consumed in it."""

    consumed: int = 0
    epoch: int = 0
    offset: int = 0


class GlobalOrder:
    """The order in which a run consumes `num_rows` rows, `rows_per_step` at a time.

    It depends on the data, the seed and the epoch only, never on ranks, micro-batches or workers, so a run
    continues at a `Position` on any number of ranks. Each epoch has its own order and holds every row once; its
    last step is smaller when the rows don't divide. `limit` ends the run after that many rows (`train_samples`).
    With a `mixture`, whose epochs have `num_rows` rows too, each takes what the mixture says instead.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        fingerprint: str,
        seed: int,
        rows_per_step: int,
        limit: int | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        if mixture is not None and mixture.num_rows != num_rows:
            raise ValueError(f"an epoch of the mixture has {mixture.num_rows} rows, not {num_rows}")
        if num_rows < 1 or rows_per_step < 1 or (limit is not None and limit < 1):
            raise ValueError(f"num_rows {num_rows}, rows_per_step {rows_per_step} and limit {limit} must be positive")
        self.num_rows = num_rows
        self.rows_per_step = rows_per_step
        self.limit = limit
        self._mixture = mixture
        self._stream = f"{fingerprint}:{seed}"
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """The rows in the order of `epoch`; read-only, and kept for the epoch last asked for."""
        # Held by name: a loader's thread may ask for another epoch meanwhile.
        latest = self._latest
        if latest is None or latest[0] != epoch:
            rows = shuffled(f"{self._stream}:{epoch}", self.num_rows)
            if self._mixture is not None:
                rows = self._mixture.epoch_rows(epoch, self._stream)[rows]
            rows.setflags(write=False)
            latest = self._latest = (epoch, rows)
        return latest[1]

    def step_size(self, position: Position) -> int:
        """How many rows the step at `position` has; 0 when the run's limit is reached."""
        if not 0 <= position.offset < self.num_rows:
            raise ValueError(f"{position} is outside an epoch of {self.num_rows} rows")
        size = min(self.rows_per_step, self.num_rows - position.offset)
        return size if self.limit is None else max(0, min(size, self.limit - position.consumed))

    def step_rows(self, position: Position) -> NDArray[np.int64]:
        """The rows of the step at `position`, in order, over all ranks; never from two epochs."""
        size = self.step_size(position)
        return self.permutation(position.epoch)[position.offset : position.offset + size]

    def advance(self, position: Position) -> Position:
        """The position after the step at `position`."""
        size = self.step_size(position)
        consumed, offset = position.consumed + size, position.offset + size
        if offset == self.num_rows:
            return Position(consumed, position.epoch + 1, 0)
        return Position(consumed, position.epoch, offset)

    def num_steps(self, *, iters: int | None = None, samples: int | None = None, epochs: int | None = None) -> int:
        """How many steps a whole run of `iters` steps, `samples` rows or `epochs` epochs takes; give exactly one."""
        if sum(value is not None for value in (iters, samples, epochs)) != 1:
            raise ValueError("give exactly one of iters, samples and epochs")
        if iters is not None:
            return iters
        steps_per_epoch = -(-self.num_rows // self.rows_per_step)
        if epochs is not None:
            return epochs * steps_per_epoch
        assert samples is not None
        whole_epochs, rest = divmod(samples, self.num_rows)
        return whole_epochs * steps_per_epoch + -(-rest // self.rows_per_step)


class StepBatches:
    """One rank's micro-batches from `start` on, for `num_steps` steps: the data loader's `batch_sampler`.

    Every rank gets the same number of micro-batches in a step, each a list of exactly `micro_batch_size` row
    numbers; where a step's rows run out, -1 stands for an empty row. Together the ranks hold each row once.
    """

    def __init__(
        self,
        order: GlobalOrder,
        start: Position,
        num_steps: int,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
    ) -> None:
        _check_place(dp_rank, dp_size, micro_batch_size)
        self.order = order
        self.start = start
        self.num_steps = num_steps
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.micro_batch_size = micro_batch_size

    def micro_batches(self, num_rows: int) -> int:
        """How many micro-batches each rank runs in a step of `num_rows` rows."""
        return -(-num_rows // (self.dp_size * self.micro_batch_size))

    def told(self, position: Position) -> str:
        """This rank's rows of the step at `position`, for an error."""
        dealt = _deal(self.order.step_rows(position), self.dp_rank, self.dp_size, self.micro_batch_size)
        rows = [str(row) for batch in dealt for row in batch if row != EMPTY_ROW]
        return f"samples {', '.join(rows) or 'none'}"

    def __iter__(self) -> Iterator[list[int]]:
        position = self.start
        for _ in range(self.num_steps):
            yield from _deal(self.order.step_rows(position), self.dp_rank, self.dp_size, self.micro_batch_size)
            position = self.order.advance(position)

    def __len__(self) -> int:
        position, total = self.start, 0
        for _ in range(self.num_steps):
            total += self.micro_batches(self.order.step_size(position))
            position = self.order.advance(position)
        return total


def evaluation_batches(num_rows: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[list[int]]:
    """One rank's share of a pass over rows 0 to `num_rows`, dealt as `StepBatches` deals a step."""
    _check_place(dp_rank, dp_size, micro_batch_size)
    return list(_deal(np.arange(num_rows), dp_rank, dp_size, micro_batch_size))


def _deal(rows: NDArray[np.int64], dp_rank: int, dp_size: int, micro_batch_size: int) -> Iterator[list[int]]:
    """Consecutive micro-batches of `rows` go to ranks 0, 1, … in turn."""
    stride = dp_size * micro_batch_size
    for start in range(dp_rank * micro_batch_size, -(-len(rows) // stride) * stride, stride):
        batch: list[int] = rows[start : start + micro_batch_size].tolist()
        yield batch + [EMPTY_ROW] * (micro_batch_size - len(batch))


def _check_place(dp_rank: int, dp_size: int, micro_batch_size: int) -> None:
    if not 0 <= dp_rank < dp_size or micro_batch_size < 1:
        raise ValueError(f"no place for rank {dp_rank} of {dp_size} with micro-batches of {micro_batch_size} rows")


def check_batch(num_rows: int | None, *, dp_size: int, micro_batch_size: int, global_batch_size: int) -> None:
    """Refuse a batch that can't be cut evenly, or that the training rows, if known, can't fill even once.

    Raises `InputError` with every problem found; each states the numbers involved and what would work.
    """
    share = dp_size * micro_batch_size
    accumulation = global_batch_size / share
    setting = (
        f"global_batch_size {global_batch_size} = {dp_size} data ranks × micro_batch_size {micro_batch_size}"
        f" × {accumulation:g} accumulated micro-batches"
    )
    problems: list[Problem] = []
    if global_batch_size % share:
        lower = global_batch_size // share * share
        choices = f"{lower} or {lower + share}" if lower else f"{share}"
        problems.append(
            Problem(
                f"{setting} leaves a part of a micro-batch",
                path="training.global_batch_size",
                hint=f"use a multiple of {share}: {choices}",
            )
        )
    if num_rows is not None and num_rows < global_batch_size:
        problems.append(
            Problem(
                f"the training data has {num_rows} rows (samples), fewer than one step takes: {setting}",
                path="training.global_batch_size",
                hint=_batches_that_fit(num_rows, dp_size, micro_batch_size),
            )
        )
    if problems:
        raise InputError(problems)


def _batches_that_fit(num_rows: int, dp_size: int, micro_batch_size: int) -> str:
    if num_rows == 0:
        return "give data that holds at least one document of two tokens"
    share = dp_size * micro_batch_size
    if num_rows >= share:
        return f"use global_batch_size {num_rows // share * share} or less, a shorter max_seq_len, or more data"
    if num_rows >= dp_size:
        fitting = num_rows // dp_size
        return f"use micro_batch_size {fitting} with global_batch_size {fitting * dp_size}, or more data"
    return f"use at most {num_rows} data ranks, a shorter max_seq_len, or more data"
