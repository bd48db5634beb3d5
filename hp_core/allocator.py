"""Memory that a step frees is kept for the next one, instead of going back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
# Whoever sets one of these has decided for themselves; the last loads another allocator.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(variables: Mapping[str, str] | None = None) -> bool:
    """Have this process's C allocator hold on to what is freed, and return whether it does.

    By default glibc gives large blocks back as soon as they are freed. A training step on a CPU frees all activations
    and gradients, which the next one asks for again: the system clears each page anew, hundreds of thousands in a step
    of a small model. The price is that the process keeps the most that it ever needed.

    Where the environment sets the allocator, it is left alone; so is any but glibc's.
    """
    variables = os.environ if variables is None else variables
    if sys.platform != "linux" or any(name in variables for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))
