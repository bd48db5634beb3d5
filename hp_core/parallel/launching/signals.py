"""Signals to the launcher: the first asks every rank to stop, the second ends everything."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self

from hp_core.signals import SignalWatch

# `timeout` signals its child and then the group that both are in: one request.
_ONE_REQUEST_SECONDS = 0.25


class LauncherSignals:
    """Calls `forward` with the first signal and `end` at the second one, from a thread, while it is entered.

    A thread, for the main one may be waiting in C code for other machines.
    """

    def __init__(self, forward: Callable[[int], None], end: Callable[[], None]) -> None:
        self._forward = forward
        self._end = end
        self._first = 0.0
        self._watch = SignalWatch(self._notice)
        self.asked: int | None = None

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.stop()

    def _notice(self, number: int) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._first = number, now
            self._forward(number)
        elif now - self._first > _ONE_REQUEST_SECONDS:
            print(f"{signal.Signals(number).name} again: ended at once", file=sys.stderr)
            self._end()
            os._exit(128 + number)
