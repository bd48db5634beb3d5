"""The CPUs of this host."""

from __future__ import annotations

import os
import sys


def usable_cpus() -> int:
    """How many of them this process may use, where the system tells; else how many there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
