"""Threads that nobody waits for, and the end of a process in which one is still at work."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


class LooseThread(threading.Thread):
    """A daemon that does `work`, and may still be at it when the process ends."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def ended_with(code: int) -> int:
    """Return `code`, what the process is to exit with; where a loose thread is at work, end the process here.

    Python's own end unwinds the stack of a thread that comes out of native code. Libraries written in C++, such as
    torch and pyarrow, abort the process at that, and its exit code would be lost. What python does before it, waiting
    for the other threads above all, is done here as well.
    """
    if not any(isinstance(one, LooseThread) for one in threading.enumerate()):
        return code
    threading._shutdown()  # type: ignore[attr-defined]  # as python's own end does, before anything else
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
