"""Trackers that raise, hang or never end cost their own rows, and no run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hp_core.observe.delivery import Delivery, Patience


class Sink:
    """A tracker that calls `act` before it keeps a row."""

    def __init__(self, act: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        self.act = act
        self.tries: list[int] = []
        self.steps: list[int] = []
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def log(self, metrics: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.tries.append(metrics["step"])
        self.act(metrics)
        self.steps.append(metrics["step"])

    def fail(self) -> None:
        self.calls.append("fail")

    def close(self) -> None:
        self.calls.append("close")


class Reports(list):
    def __call__(self, line: str, facts: dict[str, Any]) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.append((line, facts))

    @property
    def lines(self) -> list[str]:
        return [line for line, _ in self]


QUICK = Patience(pauses=(0.001, 0.001), slow=0.05, close=5.0, waiting=100)
KEPT = "training goes on, and metrics.jsonl has every row"


def run_through(sink: Any, number: int = 4, patience: Patience = QUICK) -> Reports:
    reports = Reports()
    delivery = Delivery(sink, "trackers[0] (sink)", reports, patience)
    for step in range(1, number + 1):
        delivery.log({"step": step})
    delivery.close()
    return reports


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_rows_come_in_order_on_a_thread_of_their_own_and_nothing_is_said():
    sink = Sink()
    assert run_through(sink, 50) == []
    assert sink.steps == list(range(1, 51))
    assert sink.threads == {"tracker trackers[0] (sink)"}
    assert sink.calls == ["close"]


def test_a_row_that_fails_once_is_tried_again_and_told_once():
    def act(row: dict[str, Any]) -> None:
        if sink.tries.count(row["step"]) == 1 and row["step"] in (2, 3):
            raise ConnectionError("the network\nis down")

    sink = Sink(act)
    assert run_through(sink).lines == [
        f"trackers[0] (sink): the row of step 2 can't be logged: ConnectionError: the network is down; {KEPT}"
    ]
    assert sink.steps == [1, 2, 3, 4]
    assert sink.tries == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("error", [OSError("no space left"), SystemExit(3)])
def test_a_row_that_fails_three_times_is_lost_and_counted_and_the_next_are_tried(error):
    def act(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise error

    sink = Sink(act)
    reports = run_through(sink)
    assert sink.tries == [1, 2, 2, 2, 3, 4]
    assert sink.steps == [1, 3, 4]
    first, last = reports.lines
    assert f"the row of step 2 can't be logged: {type(error).__name__}: " in first
    assert last == "trackers[0] (sink): 1 of 4 rows are lost; metrics.jsonl has them"
    told = f"{type(error).__name__}: {error}"
    assert reports[-1][1] == {"rows": 4, "logged": 3, "error": told}


def test_a_tracker_that_hangs_stalls_nobody_and_is_told():
    free = threading.Event()
    reports = Reports()
    sink = Sink(lambda row: free.wait(20) and None)
    delivery = Delivery(sink, "t", reports, Patience(slow=0.02, close=0.02))
    started = time.monotonic()
    delivery.log({"step": 1})
    wait_for(lambda: sink.tries == [1])
    time.sleep(0.03)
    delivery.log({"step": 2})
    delivery.log({"step": 3})
    assert reports.lines == [f"t has been at the row of step 1 for 0.02 s; {KEPT}"]
    delivery.close()
    assert time.monotonic() - started < 5
    assert reports.lines[1:] == [
        "t has not come to its end within 0.02 s, and is left alone",
        "t: 3 of 3 rows are lost; metrics.jsonl has them",
    ]
    assert reports[-1][1] == {"rows": 3, "logged": 0, "error": "has not come to its end within 0.02 s"}
    free.set()
    wait_for(lambda: sink.calls == ["close"])


def test_rows_that_no_longer_fit_are_lost_and_told_at_once():
    free = threading.Event()
    reports = Reports()
    sink = Sink(lambda row: free.wait(20) and None)
    delivery = Delivery(sink, "t", reports, Patience(waiting=2, close=5.0))
    delivery.log({"step": 1})
    wait_for(lambda: sink.tries == [1])
    for step in range(2, 7):
        delivery.log({"step": step})
    assert reports.lines == [f"t: 2 rows wait, and others are lost meanwhile; {KEPT}"]
    free.set()
    delivery.close()
    assert sink.steps == [1, 2, 3]
    assert reports.lines[-1] == "t: 3 of 6 rows are lost; metrics.jsonl has them"


def test_closing_does_not_wait_between_tries_and_leaves_no_row_out():
    broken = threading.Event()
    broken.set()

    def act(row: dict[str, Any]) -> None:
        if broken.is_set():
            raise ConnectionError("down")

    sink = Sink(act)
    delivery = Delivery(sink, "t", Reports(), Patience(pauses=(600.0, 600.0)))
    for step in (1, 2, 3):
        delivery.log({"step": step})
    wait_for(lambda: sink.tries == [1])
    broken.clear()
    started = time.monotonic()
    delivery.close()
    assert time.monotonic() - started < 5
    assert sink.steps == [1, 2, 3]


def test_a_failed_run_is_marked_before_the_tracker_is_closed():
    sink = Sink()
    delivery = Delivery(sink, "t", Reports())
    delivery.fail()
    delivery.close()
    assert sink.calls == ["fail", "close"]


def test_a_tracker_that_cannot_be_closed_is_told():
    class Unclosable(Sink):
        def close(self) -> None:
            raise TimeoutError("the upload took too long")

    reports = run_through(Unclosable())
    assert reports == [
        (
            "trackers[0] (sink) can't be closed: TimeoutError: the upload took too long",
            {"rows": 4, "logged": 4, "error": "TimeoutError: the upload took too long"},
        )
    ]


def test_a_row_is_the_one_that_was_logged_whatever_becomes_of_it():
    seen = []
    free = threading.Event()
    sink = Sink(lambda row: free.wait(20) and seen.append(row["loss"]))
    delivery = Delivery(sink, "t", Reports())
    row = {"step": 1, "loss": 2.0}
    delivery.log(row)
    row["loss"] = 9.0
    free.set()
    delivery.close()
    assert seen == [2.0]
