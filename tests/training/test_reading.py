"""Reading and counting a step: what the ranks agree on, and what a stop leaves as it was."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hp_core.errors import RunError, notes_of, noting
from hp_core.observe.console import Console
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.ranks import RankError, run_ranks
from hp_core.training.accounting import MicroBatch, agree_on_labels
from hp_core.training.loss import LossContract
from hp_core.training.reading import Boundary, Stoppable, read_or_stop
from hp_core.training.stopping import StopSignals

ONE_RANK = SimpleNamespace(world_size=1, sizes=SimpleNamespace(pp=1), any_on_host=bool)


def batch(*names: str) -> MicroBatch:
    labels = {name: torch.ones(1, 3, dtype=torch.int64) for name in ("labels", *names)}
    return MicroBatch.of({}, labels, LossContract())


def labels_of_ranks(environment: Any, names: list[list[str] | None]) -> tuple[str, ...]:
    with tiny_setup(environment) as setup:
        own = names[environment.rank]
        return agree_on_labels([] if own is None else [batch(*own)], None, setup)


def test_a_rank_without_rows_learns_the_label_tensors_of_the_others():
    assert run_ranks(labels_of_ranks, 2, [None, ["other_labels"]]) == [("labels", "other_labels")] * 2
    with pytest.raises(RankError, match="label tensors labels, other_labels, and elsewhere labels"):
        run_ranks(labels_of_ranks, 2, [[], ["other_labels"]])


def test_label_tensors_are_those_of_every_step():
    assert agree_on_labels([batch("other_labels")], None, ONE_RANK) == ("labels", "other_labels")
    assert agree_on_labels([], ("labels",), ONE_RANK) == ("labels",)
    assert agree_on_labels([], None, ONE_RANK) == ()
    with pytest.raises(RunError, match="label tensors labels, other_labels, and elsewhere labels; return the same"):
        agree_on_labels([batch("other_labels")], ("labels",), ONE_RANK)
    with pytest.raises(RunError, match="return the same each time"):
        agree_on_labels([batch(), batch("other_labels")], None, ONE_RANK)


def test_reading_a_step_is_undone():
    """Rows that were read for nothing may have drawn numbers, which the run that goes on draws again."""
    boundary = Boundary.of(SimpleNamespace())
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    boundary.go_back(SimpleNamespace())
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_a_wait_that_has_begun_and_each_after_it(number):
    before = signal.getsignal(number)
    with StopSignals(Console(enabled=False)) as stop:
        assert read_or_stop(lambda: "read", stop) == "read"
        timer = threading.Timer(0.2, os.kill, args=(os.getpid(), number))
        timer.start()
        began = time.monotonic()
        assert read_or_stop(lambda: time.sleep(30), stop) is None
        assert time.monotonic() - began < 10
        timer.join()
        assert stop.is_asked
        assert read_or_stop(lambda: "read", stop) is None
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_of_a_wait_nothing_is_broken_off():
    with StopSignals(Console(enabled=False)) as stop:
        signal.raise_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not stop.is_asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.is_asked


def test_one_request_may_come_twice():
    """`timeout` sends its signal to the process and to its group."""
    with StopSignals(Console(enabled=False)) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert stop.is_asked


def test_batches_end_where_a_stop_is_agreed():
    stop = StopSignals(Console(enabled=False))
    told = iter([False, False, True])
    setup = SimpleNamespace(sizes=SimpleNamespace(pp=1), any_on_host=lambda value: next(told))
    read = Stoppable(iter(range(10)).__next__, 10, stop, setup)
    assert list(read) == [0, 1]
    assert read.is_stopped


@pytest.mark.parametrize(("pp", "number", "asked"), [(1, 5, 5), (2, 40, 3), (4, 33, 2)])
def test_how_often_ranks_agree(pp, number, asked):
    count = 0

    def any_on_host(value: bool) -> bool:
        nonlocal count
        count += 1
        return value

    setup = SimpleNamespace(sizes=SimpleNamespace(pp=pp), any_on_host=any_on_host)
    read = Stoppable(iter(range(number)).__next__, number, StopSignals(Console(enabled=False)), setup)
    assert list(read) == list(range(number))
    assert (count, read.is_stopped) == (asked, False)


def test_an_exception_tells_where_it_happened():
    def place() -> str:
        return "step 3, rank 1"

    with pytest.raises(ValueError, match="no") as caught, noting(place), noting(lambda: "samples 4, 5"):
        raise ValueError("no")
    assert notes_of(caught.value) == ["samples 4, 5", "step 3, rank 1"]
