"""Signals to the launcher: the first asks every rank to stop, the second ends everything."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# `timeout` signals its child and then the group that both are in: one request.
_ONE_REQUEST_SECONDS = 0.25


class LauncherSignals:
    """Calls `forward` with the first signal and `end` at the second one, from a thread, while it is entered.

    A thread, for the main one may be waiting in C code for other machines.
    """

    def __init__(self, forward: Callable[[int], None], end: Callable[[], None]) -> None:
        self._forward = forward
        self._end = end
        self.asked: int | None = None

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="launcher-signals", daemon=True)
        self._watcher.start()
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        # Closing it would not wake the watcher while a child that was forked meanwhile holds a copy.
        self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._watcher.join()
        self._reader.close()

    def _watch(self) -> None:
        first = 0.0
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if self.asked is None:
                    self.asked, first = number, now
                    self._forward(number)
                elif now - first > _ONE_REQUEST_SECONDS:
                    name = signal.Signals(number).name
                    print(f"{name} again: ended at once", file=sys.stderr)
                    self._end()
                    os._exit(128 + number)
