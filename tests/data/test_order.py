from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.data.order import GlobalOrder, Position, StepBatches, check_batch, evaluation_batches
from hp_core.errors import InputError

small = st.integers(1, 40)


def order(num_rows: int, rows_per_step: int = 4, *, seed: int = 7, limit: int | None = None) -> GlobalOrder:
    return GlobalOrder(num_rows, fingerprint="data", seed=seed, rows_per_step=rows_per_step, limit=limit)


def walk(steps: GlobalOrder, num_steps: int, position: Position | None = None) -> list[list[int]]:
    position = position or Position()
    taken = []
    for _ in range(num_steps):
        taken.append(steps.step_rows(position).tolist())
        position = steps.advance(position)
    return taken


def test_the_order_is_pinned_forever() -> None:
    """A run must be able to resume after any library was updated, so these numbers may never change."""
    assert order(10).permutation(0).tolist() == [2, 4, 9, 7, 6, 1, 8, 0, 3, 5]
    assert order(10).permutation(1).tolist() == [8, 7, 9, 0, 2, 6, 3, 5, 1, 4]


def test_the_order_depends_on_data_seed_and_epoch_only() -> None:
    base = order(100).permutation(3).tolist()
    assert order(100, rows_per_step=9, limit=5).permutation(3).tolist() == base
    others = [
        order(100).permutation(4),
        order(100, seed=8).permutation(3),
        GlobalOrder(100, fingerprint="other", seed=7, rows_per_step=4).permutation(3),
    ]
    for other in others:
        assert sorted(other.tolist()) == list(range(100))
        assert other.tolist() != base


def test_seed_and_epoch_are_not_interchangeable() -> None:
    assert order(100, seed=1).permutation(2).tolist() != order(100, seed=2).permutation(1).tolist()
    assert order(100, seed=1).permutation(11).tolist() != order(100, seed=11).permutation(1).tolist()


@given(num_rows=small, rows_per_step=small, epochs=st.integers(1, 3))
def test_each_epoch_holds_each_row_once_and_no_step_crosses_it(num_rows: int, rows_per_step: int, epochs: int) -> None:
    steps = order(num_rows, rows_per_step)
    taken = walk(steps, steps.num_steps(epochs=epochs))
    for epoch in range(epochs):
        steps_per_epoch = len(taken) // epochs
        of_epoch = taken[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch]
        assert sorted(itertools.chain(*of_epoch)) == list(range(num_rows))
        assert all(len(rows) == rows_per_step for rows in of_epoch[:-1])


@given(num_rows=small, rows_per_step=small, samples=st.integers(1, 120))
def test_num_steps_of_samples_takes_exactly_that_many(num_rows: int, rows_per_step: int, samples: int) -> None:
    steps = order(num_rows, rows_per_step, limit=samples)
    num_steps = steps.num_steps(samples=samples)
    taken = walk(steps, num_steps + 1)
    assert sum(map(len, taken)) == samples
    assert all(taken[:num_steps])
    assert taken[num_steps] == []


def test_num_steps_counts_partial_steps_of_every_epoch() -> None:
    steps = order(10, 4)
    assert steps.num_steps(iters=5) == 5
    assert steps.num_steps(epochs=2) == 6
    assert steps.num_steps(samples=10) == 3
    assert steps.num_steps(samples=11) == 4
    with pytest.raises(ValueError, match="exactly one"):
        steps.num_steps(iters=1, epochs=1)
    with pytest.raises(ValueError, match="exactly one"):
        steps.num_steps()


def test_advance_counts_rows_over_epochs() -> None:
    steps = order(5, 4)
    first = steps.advance(Position())
    assert first == Position(consumed=4, epoch=0, offset=4)
    assert steps.advance(first) == Position(consumed=5, epoch=1, offset=0)


def test_a_position_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="outside an epoch of 5 rows"):
        order(5).step_rows(Position(6, 0, 6))


@given(
    num_rows=small,
    rows_per_step=small,
    dp_size=st.integers(1, 5),
    micro=st.integers(1, 4),
    stop=st.integers(0, 8),
    resumed_size=st.integers(1, 5),
)
def test_ranks_share_each_step_and_resume_on_another_number_of_ranks(
    num_rows: int, rows_per_step: int, dp_size: int, micro: int, stop: int, resumed_size: int
) -> None:
    steps = order(num_rows, rows_per_step)
    num_steps = steps.num_steps(epochs=2)
    stop = min(stop, num_steps)
    position = Position()
    for _ in range(stop):
        position = steps.advance(position)
    whole = walk(steps, num_steps)
    for start, count, size in ((Position(), stop, dp_size), (position, num_steps - stop, resumed_size)):
        ranks = [StepBatches(steps, start, count, rank, size, micro) for rank in range(size)]
        streams = [list(rank) for rank in ranks]
        assert {len(stream) for stream in streams} == {len(ranks[0])}
        assert all(len(batch) == micro for stream in streams for batch in stream)
        expected = whole[:stop] if start == Position() and count == stop else whole[stop:]
        at = 0
        for rows in expected:
            batches = ranks[0].micro_batches(len(rows))
            dealt = [row for stream in streams for batch in stream[at : at + batches] for row in batch]
            assert sorted(row for row in dealt if row >= 0) == sorted(rows)
            assert len(dealt) == batches * size * micro
            at += batches
        assert at == len(ranks[0])


def test_five_micro_batches_and_accumulation_of_four_are_two_steps() -> None:
    steps = order(5, 4)
    batches = StepBatches(steps, Position(), steps.num_steps(epochs=1), 0, 1, 1)
    assert steps.num_steps(epochs=1) == 2
    assert [batches.micro_batches(len(rows)) for rows in walk(steps, 2)] == [4, 1]
    assert len(list(batches)) == len(batches) == 5


@pytest.mark.parametrize("num_rows", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_evaluation_holds_each_row_once_with_equal_batches(num_rows: int, micro: int) -> None:
    ranks = [evaluation_batches(num_rows, rank, 2, micro) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    rows = [row for batches in ranks for batch in batches for row in batch]
    assert sorted(row for row in rows if row != -1) == list(range(num_rows))
    assert len(rows) - num_rows < 2 * micro


def test_dealing_does_not_depend_on_how_micro_batches_are_cut() -> None:
    """The rows of a step are the same set, in the same order, on one rank or many."""
    one = [row for batch in evaluation_batches(8, 0, 1, 2) for row in batch]
    two = [evaluation_batches(8, rank, 2, 2) for rank in range(2)]
    assert [row for pair in zip(*two, strict=True) for batch in pair for row in batch] == one == list(range(8))


def test_a_batch_that_fits_is_accepted() -> None:
    check_batch(4, dp_size=2, micro_batch_size=1, global_batch_size=4)


@pytest.mark.parametrize(
    ("num_rows", "dp_size", "micro", "batch", "said"),
    [
        (3, 2, 1, 4, ["3 rows", "2 data ranks", "global_batch_size 4", "2 accumulated", "use global_batch_size 2"]),
        (0, 1, 1, 1, ["0 rows", "at least one document of two tokens"]),
        (5, 2, 1, 8, ["5 rows", "4 accumulated", "use global_batch_size 4 or less"]),
        (5, 2, 4, 8, ["5 rows", "micro_batch_size 2 with global_batch_size 4"]),
        (3, 4, 1, 4, ["3 rows", "at most 3 data ranks"]),
        (100, 3, 4, 10, ["global_batch_size 10", "use a multiple of 12: 12"]),
        (100, 3, 2, 20, ["leaves a part of a micro-batch", "multiple of 6: 18 or 24"]),
    ],
)
def test_a_batch_that_can_not_be_is_refused_with_numbers_and_a_way_out(
    num_rows: int, dp_size: int, micro: int, batch: int, said: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        check_batch(num_rows, dp_size=dp_size, micro_batch_size=micro, global_batch_size=batch)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert {problem.path for problem in caught.value.problems} == {"training.global_batch_size"}


def test_both_batch_problems_come_together() -> None:
    with pytest.raises(InputError) as caught:
        check_batch(3, dp_size=2, micro_batch_size=1, global_batch_size=5)
    assert len(caught.value.problems) == 2


def test_a_large_epoch_is_planned_quickly_and_kept() -> None:
    steps = order(1_000_000, 1000)
    assert steps.permutation(0) is steps.permutation(0)
    assert np.array_equal(np.sort(steps.permutation(0)), np.arange(1_000_000))
