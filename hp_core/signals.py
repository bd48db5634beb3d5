"""Hearing of a request to stop at once, whatever the main thread is at."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


class SignalWatch:
    """Calls `notice` with the number of each stop signal, in a thread of its own, from `start` to `stop`.

    The handlers of python run only between its instructions, and native code may hold the main thread for minutes. So
    the interpreter's C handler tells the thread, through a socket. `handle` is what the main thread does when it can.
    """

    def __init__(
        self, notice: Callable[[int], None], handle: Callable[[int, FrameType | None], Any] = _do_nothing
    ) -> None:
        self._notice = notice
        self._handle = handle

    def start(self) -> None:
        """Take the place of the handlers that were there; called in the main thread."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._watcher.start()
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    def stop(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        # Closing it would not wake the watcher while a child that was forked meanwhile holds a copy.
        self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._watcher.join()
        self._reader.close()

    def _watch(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._notice(number)
