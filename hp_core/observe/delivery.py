"""Rows on their way to a tracker, on a thread of their own: no tracker can stall a run, or end it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_core.entry_points import describe
from hp_core.observe.trackers import METRICS_FILE, MarksFailure, Tracker
from hp_core.threads import LooseThread

_KEPT = f"training goes on, and {METRICS_FILE} has every row"


@dataclass(frozen=True)
class Patience:
    """How long a tracker is put up with.

    `pauses` are the seconds between two tries of one row, `slow` those after which a row that is still being logged is
    told, `close` those for all that is left when the run ends; `waiting` are the rows that may wait.
    """

    pauses: tuple[float, ...] = (1.0, 10.0)
    slow: float = 60.0
    close: float = 30.0
    waiting: int = 10_000


class Delivery:
    """A tracker as the run sees it: takes rows at once, and hands them over in order, one at a time.

    A row that the tracker raises at is tried again after each of the pauses and then lost; the next rows are tried like
    any other. Whatever the tracker does, `log` and `close` don't raise.

    Args:
        tracker: where the rows go; it is called on one thread, which isn't the main one.
        name: what the tracker is called towards the user.
        report: gets a line for the user and the facts for the manifest, on the thread of `log` and `close`: the first
            row that fails, the first that takes long, that rows no longer fit, and what is lost in the end.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        report: Callable[[str, dict[str, Any]], None],
        patience: Patience | None = None,
    ) -> None:
        self._tracker = tracker
        self._name = name
        self._report = report
        self._patience = patience or Patience()
        self._waiting: deque[dict[str, Any]] = deque()
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._num_taken = self._num_logged = 0
        self._error: str | None = None
        self._current: tuple[Any, float] | None = None
        self._notes: deque[str] = deque()
        self._told: set[str] = set()
        self._has_failed = False
        self._thread = LooseThread(self._work, f"tracker {name}")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Take one row."""
        with self._news:
            self._num_taken += 1
            if len(self._waiting) < self._patience.waiting:
                self._waiting.append(dict(metrics))
                self._news.notify()
            else:
                self._note("full", f": {self._patience.waiting:,} rows wait, and others are lost meanwhile; {_KEPT}")
        if self._thread.ident is None:
            self._thread.start()
        self._note_if_slow()
        self._tell()

    def fail(self) -> None:
        """Let the tracker know, before it is closed, that the run has failed."""
        self._has_failed = True

    def close(self) -> None:
        """Give the tracker a while for the rows that wait and for its own end; then say what is lost."""
        with self._news:
            self._closing.set()
            self._news.notify()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(self._patience.close)
        if self._thread.is_alive():
            what = f"has not come to its end within {self._patience.close:g} s"
            self._error = self._error or what
            self._note("left", f" {what}, and is left alone")
        if lost := self._num_taken - self._num_logged:
            self._note("lost", f": {lost:,} of {self._num_taken:,} rows are lost; {METRICS_FILE} has them")
        self._tell()

    def _work(self) -> None:
        while (row := self._next()) is not None:
            self._hand_over(row)
        try:
            if self._has_failed and isinstance(self._tracker, MarksFailure):
                self._tracker.fail()
            self._tracker.close()
        except (Exception, SystemExit) as error:
            self._fault("unclosed", " can't be closed", error)

    def _next(self) -> dict[str, Any] | None:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closing.is_set())
            return self._waiting.popleft() if self._waiting else None

    def _hand_over(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        for pause in (*self._patience.pauses, None):
            self._current = (step, time.monotonic())
            try:
                self._tracker.log(row)
                self._num_logged += 1
                return
            except (Exception, SystemExit) as error:
                self._fault("failed", f": the row of step {step} can't be logged", error)
            finally:
                self._current = None
            if pause is not None:
                self._closing.wait(pause)

    def _fault(self, kind: str, what: str, error: BaseException) -> None:
        text = describe(error)
        self._error = self._error or text
        self._note(kind, f"{what}: {text}" if kind == "unclosed" else f"{what}: {text}; {_KEPT}")

    def _note_if_slow(self) -> None:
        current = self._current
        if current is not None and time.monotonic() - current[1] > self._patience.slow:
            self._note("slow", f" has been at the row of step {current[0]} for {self._patience.slow:g} s; {_KEPT}")

    def _note(self, kind: str, text: str) -> None:
        """Keep a line for the user, the first of its kind."""
        if kind not in self._told:
            self._told.add(kind)
            self._notes.append(self._name + text)

    def _tell(self) -> None:
        while self._notes:
            facts = {"rows": self._num_taken, "logged": self._num_logged, "error": self._error}
            self._report(self._notes.popleft(), facts)
