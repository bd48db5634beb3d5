"""A plugin that writes down what a step on a GPU takes: seconds, the most memory, and how often it waits."""

from __future__ import annotations

import json
import time
import warnings
from statistics import median
from typing import Any

import torch

from hp_core.hookspecs import hookimpl

RESULTS = "gpu.json"
# Of the steps that are timed; those in which waits are counted come after them, and are slower.
NUM_WARM_UP, NUM_TIMED = 10, 20


class Watch:
    """Times and waits of the steps so far."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.waits: list[list[str]] = []
        self.began = 0.0
        self._caught: Any = None
        self._seen: list[warnings.WarningMessage] = []

    def start(self, step: int) -> None:
        """Begin a step; from some step on, torch warns whenever the host waits for the device."""
        if step >= NUM_WARM_UP + NUM_TIMED:
            self._caught = warnings.catch_warnings(record=True)
            self._seen = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        else:
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def end(self) -> None:
        """End the step."""
        if self._caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self._caught = None
            found = [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in self._seen]
            self.waits.append(found)
            return
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


_watch = Watch()


@hookimpl
def on_train_start(run: Any) -> None:
    torch.cuda.reset_peak_memory_stats()
    _watch.start(0)


@hookimpl
def on_step_end(run: Any, step: int) -> None:
    _watch.end()
    _watch.start(step)


@hookimpl
def on_train_end(run: Any) -> None:
    _watch.end()
    # The last watch began behind the last step, and saw none.
    quiet = min(_watch.waits[:-1], key=len)
    found = {
        "step_ms": round(1000 * median(_watch.seconds[NUM_WARM_UP:]), 2),
        "peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20),
        "waits_in_a_quiet_step": quiet,
    }
    (run.directory.path / RESULTS).write_text(json.dumps(found))
