"""Which rows each step of a run takes, from where the run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from hp_core.data.order import GlobalOrder, Position, StepBatches
from hp_core.data.protocols import RowDataset
from hp_core.data.rows import WithEmptyRow
from hp_core.data.streaming import Cursor, StreamBatches, StreamingRows, StreamOrder
from hp_core.errors import InputError, Problem
from hp_core.parallel.agreement import gathered
from hp_core.training.run import Run
from hp_core.training.schedule import steps_left
from hp_core.training.state import RunState


@dataclass(frozen=True)
class Feed:
    """The order of the rows, this rank's share of it, and the numbers of the run's last step and of this call's."""

    order: GlobalOrder | StreamOrder
    batches: StepBatches | StreamBatches
    num_steps: int
    last_step: int


def feed_of(train: RowDataset, run: Run) -> Feed:
    """Fix the order of the training rows, and this rank's micro-batches from where the run stands.

    Raises:
        InputError: rows are streamed, and the run is to end after epochs or samples, or was dealt to other data ranks.
    """
    streamed = train.streamed if isinstance(train, WithEmptyRow) else None
    if streamed is not None:
        return _stream_feed(streamed, run)
    training, state, setup = run.config.training, run.state, run.setup
    mixed = train.mixed if isinstance(train, WithEmptyRow) else None
    order = GlobalOrder(
        len(train),
        fingerprint=train.fingerprint,
        seed=training.seed,
        rows_per_step=training.global_batch_size,
        limit=training.train_samples,
        mixture=mixed.mixture if mixed is not None else None,
    )
    num_steps = state.step + steps_left(order, training, state.step, state.position)
    last_step = min(num_steps, training.stop_after or num_steps)
    num_left = max(0, last_step - state.step)
    place = (setup.dp_rank, setup.dp_size, training.micro_batch_size)
    return Feed(order, StepBatches(order, state.position, num_left, *place), num_steps, last_step)


def _stream_feed(rows: StreamingRows, run: Run) -> Feed:
    training, state, setup = run.config.training, run.state, run.setup
    if training.train_iters is None:
        key = "train_epochs" if training.train_epochs is not None else "train_samples"
        hint = "write train_iters, or leave dataset.streaming out"
        raise InputError(Problem("the length of streamed data is not known", path=f"training.{key}", hint=hint))
    if state.cursors and len(state.cursors) != setup.dp_size:
        raise InputError(
            f"the checkpoint's streamed data was dealt to {len(state.cursors)} data ranks, and this run has "
            f"{setup.dp_size}: where each stands in its documents fits no other number; resume with "
            f"{len(state.cursors)} data ranks"
        )
    start = Cursor(*state.cursors[setup.dp_rank]) if state.cursors else Cursor()
    last_step = min(training.train_iters, training.stop_after or training.train_iters)
    num_left = max(0, last_step - state.step)
    batches = StreamBatches(rows, start, num_left, training.global_batch_size, training.micro_batch_size, training.seed)
    return Feed(StreamOrder(batches), batches, training.train_iters, last_step)


def keep_cursors(batches: StepBatches | StreamBatches, run: Run) -> None:
    """Bring up to date where each data rank stands in streamed data, before a checkpoint. Every rank calls it.

    The manifest tells what became of the documents that the main rank has read since this process began.
    """
    if not isinstance(batches, StreamBatches):
        return
    by_rank = dict(gathered((run.setup.dp_rank, list(astuple(batches.cursor))), run.setup))
    run.state.cursors = [by_rank[rank] for rank in range(run.setup.dp_size)]
    if batches.report is not None:
        run.record(streamed=batches.report.as_dict())


class SourceCounts:
    """Counts, in a run's state, the rows and targets that it took of each named source.

    Every rank knows the global order and how many targets each row has, so nothing is sent.
    """

    def __init__(self, dataset: RowDataset, order: GlobalOrder | StreamOrder) -> None:
        self._mixed = dataset.mixed if isinstance(dataset, WithEmptyRow) else None
        self._order = order

    def add(self, state: RunState, position: Position, *, is_trained: bool) -> None:
        """Count the step at `position`; its targets only if it moved the weights."""
        if self._mixed is None or not isinstance(self._order, GlobalOrder):
            return
        amounts = self._mixed.amounts(self._order.step_rows(position))
        for name, (rows, targets) in amounts.items():
            state.source_rows[name] = state.source_rows.get(name, 0) + rows
            state.source_targets[name] = state.source_targets.get(name, 0) + targets * is_trained


def source_metrics(state: RunState) -> Mapping[str, int]:
    """`rows/NAME` and `targets/NAME` of a run so far, for each named source of its data."""
    return {
        **{f"rows/{name}": count for name, count in state.source_rows.items()},
        **{f"targets/{name}": count for name, count in state.source_targets.items()},
    }
