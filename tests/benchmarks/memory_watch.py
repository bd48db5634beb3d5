"""A plugin that measures the memory of the process that trains, in a file of the run's directory."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

from hp_core.hookspecs import hookimpl

RESULTS = "memory_watch.json"
EVERY = 10
PAGE_BYTES = 4096


def resident_bytes() -> int:
    """The memory of this process that is in use, freed memory given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def clear_name_cache() -> None:
    """Empty python's cache of attributes.

    It holds up to 4096 names, also those that torch and transformers make anew for each look-up, and so grows for long.
    """
    if sys.version_info >= (3, 13):
        sys._clear_internal_caches()
    else:
        sys._clear_type_cache()


class MemoryWatch:
    """Resident memory, and the blocks that python has for its objects, after every tenth step."""

    def __init__(self) -> None:
        # Made beforehand: what is measured has no part in what grows.
        self.steps: list[int] = []
        self.resident: list[int] = []
        self.blocks: list[int] = []

    @hookimpl
    def on_step_end(self, run: Any, step: int) -> None:
        """Measure."""
        if step % EVERY == 0:
            gc.collect()
            clear_name_cache()
            self.steps.append(step)
            self.resident.append(resident_bytes())
            self.blocks.append(sys.getallocatedblocks())

    @hookimpl
    def on_train_end(self, run: Any, report: Any) -> None:
        """Write what was measured."""
        found = {"steps": self.steps, "resident_bytes": self.resident, "python_blocks": self.blocks}
        (run.directory.path / RESULTS).write_text(json.dumps(found))


_watch = MemoryWatch()
on_step_end = _watch.on_step_end
on_train_end = _watch.on_train_end
