"""How a process ended, in words."""

from __future__ import annotations

import signal

_HINTS = {
    signal.SIGKILL: "by the kernel if memory ran out (`dmesg | grep -i oom` tells), or by someone",
    signal.SIGABRT: "which ranks do whose collectives don't fit together, and libraries that meet a bug; see above",
    signal.SIGSEGV: "a bug in a library",
    signal.SIGBUS: "which happens when /dev/shm is full",
}


def told_exit(code: int) -> str:
    """What an exit code says of a process that left no word; a signal's number is negative."""
    if code >= 0:
        return f"ended with code {code}, without a word"
    number = signal.Signals(-code)
    hint = f", {_HINTS[number]}" if number in _HINTS else ""
    return f"was ended by {number.name}{hint}"
