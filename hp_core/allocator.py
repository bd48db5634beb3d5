"""Memory that a step frees is kept for the next one, instead of going back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
# Of madvise(2).
_HUGE_PAGES = 14
_HUGE_PAGE = 2 << 20
# Whoever sets one of these has decided for themselves; the last loads another allocator.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(variables: Mapping[str, str] | None = None) -> bool:
    """Have this process's C allocator hold on to what is freed, and return whether it does.

    By default glibc gives large blocks back as soon as they are freed. A training step on a CPU frees all activations
    and gradients, which the next one asks for again: the system clears each page anew, hundreds of thousands in a step
    of a small model. The price is that the process keeps the most that it ever needed.

    What is kept lies in one place, so it is also asked to be made of huge pages, of which fewer have to be looked up.

    Where the environment sets the allocator, it is left alone; so is any but glibc's.
    """
    variables = os.environ if variables is None else variables
    if sys.platform != "linux" or any(name in variables for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))
    if kept and not _counts_what_is_asked_for():
        _ask_for_huge_pages(library, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return kept


def _counts_what_is_asked_for() -> bool:
    """Whether the system sets aside what processes ask for, instead of what they use."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return True


def _ask_for_huge_pages(library: ctypes.CDLL, size: int) -> None:
    """Take addresses for so many bytes, ask for huge pages there, and give them to the allocator's store.

    No memory is used before something lies at an address. Where the system has none of it, nothing changes.
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = library.malloc(size)
    if begin is None:
        return
    first = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
    end = (begin + size) // _HUGE_PAGE * _HUGE_PAGE
    library.madvise(first, end - first, _HUGE_PAGES)
    library.free(begin)
