"""Traces of single steps, on the ranks that the recipe names, in `profile/` of the run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hp_core.config.profiler import NO_SNAPSHOT, ProfilerConfig
from hp_core.entry_points import describe
from hp_core.errors import InputError, Problem
from hp_core.hookspecs import hookimpl
from hp_core.observe.run_directory import PROFILE
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.run import Report, Run

# Rows of the table; a step of a transformer has about a hundred kinds of operators.
_TABLE_ROWS = 50
# What the allocator did last; a step of a large model makes some thousands of entries.
_HISTORY_ENTRIES = 200_000


def require_profile(config: ProfilerConfig, setup: DistributedSetup, last_step: int) -> None:
    """Refuse to profile what the run doesn't have.

    Raises:
        InputError: names every such step, rank and device.
    """
    if problems := list(_problems(config, setup, last_step)):
        raise InputError(problems)


def _problems(config: ProfilerConfig, setup: DistributedSetup, last_step: int) -> Iterator[Problem]:
    if config.last_step is None:
        return
    if config.last_step > last_step:
        key = "start_step" if config.stop_step is None else "stop_step"
        yield Problem(f"step {config.last_step}: the run ends with step {last_step}", path=f"profiler.{key}")
    for index, rank in enumerate(config.ranks):
        if rank >= setup.world_size:
            have = "rank 0 alone" if setup.world_size == 1 else f"ranks 0 to {setup.world_size - 1}"
            yield Problem(f"no rank {rank}: the run has {have}", path=f"profiler.ranks[{index}]")
    if config.memory_snapshot and setup.device.type != "cuda":
        yield Problem(NO_SNAPSHOT, path="profiler.memory_snapshot")


class Profiling:
    """The hook implementations that profile a run: one object for each, and none where the recipe profiles nothing.

    It looks at hooks alone, so that an evaluation or a checkpoint between two profiled steps is in the trace.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        assert config.start_step is not None
        assert config.last_step is not None
        self._config = config
        self._start, self._last = config.start_step, config.last_step
        self._first: int | None = None
        self._recording: _Recording | None = None

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        """Begin, if the next step is to be profiled."""
        if run.state.step >= self._last:
            run.console.say(f"profiler: the run goes on after step {run.state.step}, so that none is left to profile")
        self._begin_if_due(run)

    @hookimpl
    def on_step_end(self, run: Run, step: int) -> None:
        """Begin or end, if it is time to."""
        if self._first is None:
            self._begin_if_due(run)
        elif step == self._last:
            self._end(run)
        elif self._recording is not None:
            self._recording.next_step(step + 1)

    @hookimpl
    def on_train_end(self, run: Run, report: Report) -> None:
        """Write what there is of a run that was stopped."""
        if self._first is not None and run.state.step >= self._first:
            self._end(run)
        elif report.stopped and run.state.step < self._last:
            self._drop()
            run.console.say(f"profiler: the run stopped after step {run.state.step}, so that nothing was profiled")

    @hookimpl
    def on_exception(self, run: Run) -> None:
        """Give up the trace; what the allocator did before it ran out of memory is written all the same."""
        try:
            if self._recording is not None and self._config.memory_snapshot and self._first is not None:
                self._recording.write_memory(run.directory.path / PROFILE, self._name(run.setup.rank, run.state.step))
        except Exception as error:
            # What ended the run matters more.
            run.console.say(f"profiler: {describe(error)}")
        finally:
            self._drop()

    def _begin_if_due(self, run: Run) -> None:
        step = run.state.step + 1
        if self._start <= step <= self._last:
            self._first = step
            if run.setup.rank in self._config.ranks:
                self._recording = _Recording(self._config, run.setup.device, step)

    def _end(self, run: Run) -> None:
        first, last = self._first, run.state.step
        assert first is not None
        folder = run.directory.path / PROFILE
        if self._recording is not None:
            self._recording.write(folder, self._name(run.setup.rank, last))
        self._first, self._recording = None, None
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        ranks = ", ".join(str(rank) for rank in sorted(self._config.ranks))
        run.console.say(f"profile of {steps}, rank{'s' if len(self._config.ranks) > 1 else ''} {ranks}: {folder}")

    def _drop(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _name(self, rank: int, last: int) -> str:
        steps = f"step{self._first}" if self._first == last else f"steps{self._first}-{last}"
        return f"rank{rank}.{steps}"


class _Recording:
    """What one rank records, from its making on."""

    def __init__(self, config: ProfilerConfig, device: torch.device, step: int) -> None:
        self._config = config
        self._on_cuda = device.type == "cuda"
        if config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._profile = profile(
            activities=activities,
            record_shapes=config.record_shapes,
            with_stack=config.with_stack,
            profile_memory=config.profile_memory,
        )
        self._profile.start()
        self._mark = self._marked(step)

    def next_step(self, step: int) -> None:
        """Mark where a step ends and the next begins."""
        self._mark.__exit__(None, None, None)
        self._mark = self._marked(step)

    def stop(self) -> None:
        """Record no more."""
        self._mark.__exit__(None, None, None)
        self._profile.stop()
        if self._config.memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, folder: Path, name: str) -> None:
        """Stop, and write the trace, the table of the operators that took most, and what the allocator did."""
        if self._config.memory_snapshot:
            self.write_memory(folder, name)
        self.stop()
        _whole(folder / f"{name}.json.gz", lambda path: self._profile.export_chrome_trace(str(path)))
        order = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS, max_name_column_width=80)
        _whole(folder / f"{name}.txt", lambda path: path.write_text(f"{table}\n", encoding="utf-8"))

    def write_memory(self, folder: Path, name: str) -> None:
        """Write what the allocator has done since the beginning."""
        _whole(folder / f"{name}.memory.pickle", lambda path: torch.cuda.memory._dump_snapshot(str(path)))

    def _marked(self, step: int) -> record_function:
        # The name that tools for traces know steps by.
        mark = record_function(f"ProfilerStep#{step}")
        mark.__enter__()
        return mark


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file so that nobody sees half of it under its name; the name's end tells torch to compress."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".writing-{path.name}")
    write(temporary)
    temporary.replace(path)
