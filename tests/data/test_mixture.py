from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.data.mixture import Mixture, largest_remainders
from hp_core.data.order import GlobalOrder, Position, StepBatches
from hp_core.data.shuffling import shuffled_passes
from hp_core.errors import ArgumentError


def counts(sizes: list[int], **settings: object) -> tuple[int, ...]:
    return Mixture.of([f"s{number}" for number in range(len(sizes))], sizes, **settings).counts  # type: ignore[arg-type]


def order(mixture: Mixture, rows_per_step: int = 4, seed: int = 7) -> GlobalOrder:
    return GlobalOrder(mixture.num_rows, fingerprint="data", seed=seed, rows_per_step=rows_per_step, mixture=mixture)


def test_shares_by_hand() -> None:
    # 100 rows: 0.7 and 0.3 of them; weights need not add up to 1.
    assert counts([90, 10], weights=[0.7, 0.3]) == (70, 30)
    assert counts([90, 10], weights=[7, 3]) == (70, 30)
    # Thirds of 10 are 3.33 each: the row that is left goes to the first of equal rests.
    assert counts([5, 3, 2], weights=[1, 1, 1]) == (4, 3, 3)
    # Quotas 1.5, 3.9 and 3.6 of 9: the two rows that are left go to the rests .9 and .6.
    assert largest_remainders(9, [15, 39, 36]) == [1, 4, 4]
    # Square roots of 64, 16 and 1 are 8, 4 and 1: of 81 rows 49.8, 24.9 and 6.2.
    assert counts([64, 16, 1], temperature=2.0) == (50, 25, 6)
    assert counts([64, 16, 1], temperature=1.0) == (64, 16, 1)
    assert counts([64, 16, 1], temperature=1e9) == (27, 27, 27)
    assert counts([1000, 999], temperature=0.001) == (1462, 537)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 10**9))
def test_shares_add_up_and_are_less_than_a_row_off(weights: list[int], total: int) -> None:
    found = largest_remainders(total, weights)
    assert sum(found) == total
    for count, weight in zip(found, weights, strict=True):
        assert abs(count - Fraction(total * weight, sum(weights))) < 1


def test_a_source_that_would_get_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sources\.s1: an epoch of 11 rows would take none of it"):
        counts([10, 1], weights=[1, 1e-3])
    with pytest.raises(ArgumentError, match=r"temperature: 0\.001 leaves small sources nothing"):
        counts([10, 1], temperature=0.001)


PINNED = [[1, 8, 6, 6, 5, 8, 4, 0, 7], [8, 8, 3, 5, 6, 0, 7, 2, 7]]


def test_the_order_of_a_mixture_is_pinned_forever() -> None:
    mixture = Mixture(("a", "b"), (6, 3), (4, 5))
    assert order(mixture).permutation(0).tolist() == PINNED[0]
    assert order(mixture).permutation(1).tolist() == PINNED[1]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 50])
def test_passes_that_are_drawn_together_are_those_that_are_drawn_alone(size: int) -> None:
    together = shuffled_passes("a source", size, 3, 7)
    assert [sorted(one) for one in together.tolist()] == [list(range(size))] * 7
    for number, one in enumerate(together):
        assert one.tolist() == shuffled_passes("a source", size, 3 + number, 1)[0].tolist()


def test_each_epoch_of_a_tiny_source_is_drawn_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def spy(*arguments: Any) -> Any:
        calls.append(arguments[3])
        return shuffled_passes(*arguments)

    monkeypatch.setattr("hp_core.data.mixture.shuffled_passes", spy)
    rows = Mixture.of(["tiny", "large"], [2, 998], weights=[1, 1]).epoch_rows(1, "stream")
    assert Counter(rows.tolist())[0] == Counter(rows.tolist())[1] == 250
    assert calls == [250, 2]


def test_a_source_is_used_up_before_a_row_comes_again() -> None:
    # Of 6 rows an epoch takes 4, of 3 rows 5: passes end in the middle of an epoch.
    mixture = Mixture(("a", "b"), (6, 3), (4, 5))
    epochs = [order(mixture).permutation(epoch).tolist() for epoch in range(6)]
    for rows in epochs:
        assert sum(row < 6 for row in rows) == 4
    # The first epoch lies in the first pass over `a`, and holds the whole first pass over `b` and part of the second.
    assert max(Counter(row for row in epochs[0] if row < 6).values()) == 1
    assert sorted(Counter(row for row in epochs[0] if row >= 6).values()) == [1, 2, 2]
    taken = Counter(row for rows in epochs for row in rows)
    assert [taken[row] for row in range(6)] == [4] * 6
    assert [taken[row] for row in range(6, 9)] == [10] * 3
    assert len({tuple(rows) for rows in epochs}) == 6


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(sizes, st.data())
def test_passes_hold_each_row_once_however_epochs_cut_them(sizes: list[int], data: st.DataObject) -> None:
    taken = [data.draw(st.integers(1, 20)) for _ in sizes]
    mixture = Mixture(tuple(f"s{number}" for number in range(len(sizes))), tuple(sizes), tuple(taken))
    num_epochs = 4
    streams: list[list[int]] = [[] for _ in sizes]
    ends = np.cumsum(sizes)
    for epoch in range(num_epochs):
        rows = mixture.epoch_rows(epoch, "stream")
        for row in rows.tolist():
            streams[int(np.searchsorted(ends, row, side="right"))].append(row)
    for number, (stream, size) in enumerate(zip(streams, sizes, strict=True)):
        assert len(stream) == num_epochs * taken[number]
        first = int(ends[number]) - size
        for start in range(0, len(stream) - size + 1, size):
            assert sorted(stream[start : start + size]) == list(range(first, first + size))
        rest = stream[len(stream) // size * size :]
        assert len(set(rest)) == len(rest)


@given(sizes, st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6))
def test_ranks_and_micro_batches_share_the_same_steps(
    sizes: list[int], rows_per_step: int, dp_size: int, micro: int, stop: int
) -> None:
    mixture = (
        Mixture.of([str(number) for number in range(len(sizes))], sizes, temperature=3.0)
        if len(sizes) > 1
        else (Mixture(("one",), (sizes[0],), (sizes[0],)))
    )
    steps = order(mixture, rows_per_step)
    num_steps = steps.num_steps(epochs=2)
    position, whole = Position(), []
    start = Position()
    for number in range(num_steps):
        if number == min(stop, num_steps - 1):
            start = position
        whole.append(sorted(steps.step_rows(position).tolist()))
        position = steps.advance(position)
    expected = whole[min(stop, num_steps - 1) :]
    # An order of its own, as a resumed run has.
    again = order(mixture, rows_per_step)
    streams = [list(StepBatches(again, start, len(expected), rank, dp_size, micro)) for rank in range(dp_size)]
    at = 0
    for rows in expected:
        batches = -(-len(rows) // (dp_size * micro))
        dealt = [row for stream in streams for batch in stream[at : at + batches] for row in batch if row >= 0]
        assert sorted(dealt) == rows
        at += batches


def test_the_seed_changes_which_rows_come_first() -> None:
    mixture = Mixture(("a", "b"), (60, 30), (45, 45))
    assert order(mixture).permutation(0).tolist() == order(mixture).permutation(0).tolist()
    assert set(order(mixture).permutation(0)) != set(order(mixture, seed=8).permutation(0))


def test_an_epoch_of_another_length_is_a_fault_of_the_code() -> None:
    with pytest.raises(ValueError, match="9 rows, not 8"):
        GlobalOrder(8, fingerprint="", seed=0, rows_per_step=1, mixture=Mixture(("a",), (9,), (9,)))
