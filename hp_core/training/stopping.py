"""Requests to stop: a signal is noted at once, and heeded where every rank can save."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

from hp_core.observe.console import Console
from hp_core.parallel.launching.records import LaunchFolder
from hp_core.signals import SignalWatch

# A signal to a process and one to its group, as `timeout` sends them, are one request.
_ONE_REQUEST_SECONDS = 0.1


class WaitEnded(BaseException):
    """A stop was asked for while the process waited for data. No `Exception`, so that no data set swallows it."""


class StopAgreed(BaseException):
    """All ranks know that the run is to stop, and stand at the same step boundary. It is no error."""


class StopSignals:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C while it is entered; a second one ends the process at once.

    A collective may hold the main thread for minutes, so a thread takes care of the second signal. Signals are a matter
    of the main thread: entered in another, it never asks for a stop.

    `is_saved` tells whether there is a complete checkpoint of the step that the run stands at.
    """

    def __init__(self, console: Console, is_saved: Callable[[], bool] = lambda: False) -> None:
        self._console = console
        self._is_saved = is_saved
        self._first: float | None = None
        self._is_asked = False
        self._is_waiting = False
        self._is_entered = False
        self._watch = SignalWatch(self._notice, self._handle)
        # It passes the first signal on, which the rank may have got already, and ends everything at the second.
        self._has_launcher = LaunchFolder.of_environment() is not None

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self._is_asked

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """End what runs inside when a stop is asked for, or was.

        Raises:
            WaitEnded: it was.
        """
        self._is_waiting = True
        try:
            if self.is_asked:
                raise WaitEnded
            yield
        finally:
            self._is_waiting = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._is_entered = True
        self._watch.start()
        os.register_at_fork(after_in_child=self._after_fork)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_entered:
            self._is_entered = False
            self._watch.stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if self._is_waiting:
            self._is_waiting = False
            raise WaitEnded

    def _notice(self, number: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._is_asked = now, True
            name = signal.Signals(number).name
            self._console.say(f"{name}: stopping at the next step; a second signal ends the run at once")
        elif now - self._first > _ONE_REQUEST_SECONDS and not self._has_launcher:
            self._end_now(number)

    def _end_now(self, number: int) -> None:
        saved = "the checkpoint of this step is complete" if self._is_saved() else "without a checkpoint of this step"
        self._console.leave(f"{signal.Signals(number).name} again: ended at once, {saved}")
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(128 + number)

    def _after_fork(self) -> None:
        # A child that wrote to the socket, which it shares with its parent, would stop the parent.
        if self._is_entered:
            self._is_entered = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number in (signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)


def follow_parent(*_: Any) -> None:
    """Have a worker process heed no signal but its parent's SIGTERM; called in the worker, with any arguments.

    A terminal, a scheduler or a container sends its signals to every process; workers that ended by one would take
    the run with them before it has saved.
    """
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(parent,), name="stop-signals", daemon=True).start()


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
