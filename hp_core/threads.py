"""Threads that nobody waits for, and the end of a process in which one is still at work."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable


class LooseThread(threading.Thread):
    """A daemon that does `work`, and may still be at it when the process ends."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def ended_with(code: int) -> int:
    """Return `code`, what the process is to exit with; where a loose thread is at work, end the process here.

    Python's own end unwinds the stack of a thread that comes out of native code. Libraries written in C++, such as
    torch and pyarrow, abort the process at that, and its exit code would be lost.
    """
    if not any(isinstance(one, LooseThread) for one in threading.enumerate()):
        return code
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
