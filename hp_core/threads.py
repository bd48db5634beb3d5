"""Threads that nobody waits for, and the end of a process in which one is still at work."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

# Longer than reading a batch takes as a rule, and short enough for whoever waits for a script to end.
_PATIENCE_S = 5.0


class LooseThread(threading.Thread):
    """A daemon that does `work`, and may still be at it when the process ends.

    A process that ends by `leave` doesn't wait for it. Any other, such as a script of a user's own, waits at its
    end for a few seconds, after it has called `let_go`, and is aborted (exit code 134) if the thread is at work in
    native code even then.
    """

    def __init__(self, work: Callable[[], None], name: str, let_go: Callable[[], None] | None = None) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.let_go = let_go

    def start(self) -> None:
        """Begin the work."""
        atexit.unregister(_wait)
        atexit.register(_wait)
        super().start()


def _wait() -> None:
    until = time.monotonic() + _PATIENCE_S
    threads = _at_work()
    for one in threads:
        if one.let_go is not None:
            one.let_go()
    for one in threads:
        one.join(max(0.0, until - time.monotonic()))


def _at_work() -> list[LooseThread]:
    return [one for one in threading.enumerate() if isinstance(one, LooseThread)]


def leave(code: int) -> NoReturn:
    """End the process, whatever threads of native code are at.

    Python's own end unwinds the stack of a thread that comes out of native code. Libraries written in C++, such as
    torch and pyarrow, abort the process at that, and its exit code would be lost: threads of gloo let go of the
    tensors they have sent when they come to it. A signal that comes during python's own end kills the process. What
    python does before it, waiting for the other threads above all, is done here as well.
    """
    atexit.unregister(_wait)
    threading._shutdown()  # type: ignore[attr-defined]  # as python's own end does, before anything else
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
