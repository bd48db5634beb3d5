"""Runs in processes of their own that have everything imported already, and can be killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from hp_core.checkpoint.layout import CHECKPOINTS
from hp_core.config import load_recipe
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.training.session import train
from tests.e2e.runs import WITH_COMPONENTS

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}


@dataclass
class Killer:
    """Kills its process before the `at`-th change of files under a checkpoints folder; 0 only counts them."""

    at: int
    count: int = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            _, _, flags = arguments
            is_change = bool(flags & _WRITING)
        else:
            is_change = event in _CHANGES
        # What is deleted within an open folder has no path, only a name.
        if is_change and (f"/{CHECKPOINTS}" in str(arguments[0]) or event in ("os.remove", "os.rmdir")):
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


class Job(AbstractContextManager["Job"]):
    """A run on `nproc` ranks whose output goes to `log`; what is left of it at the end is killed."""

    def __init__(self, path: Path, overrides: Sequence[str], log: Path, *, nproc: int = 1, kill_at: int = 0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*WITH_COMPONENTS, __name__])
        self.log = log
        # Held here, so that the death of a rank doesn't take it away.
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self.ranks = []
        for rank in range(nproc):
            environment = ProcessEnvironment("torchrun", rank, nproc, rank, "127.0.0.1", self.store.port, True)
            at = kill_at if rank == 0 else 0
            arguments = (environment if nproc > 1 else ProcessEnvironment(), str(path), list(overrides), str(log), at)
            self.ranks.append(context.Process(target=_run, args=arguments))

    def __enter__(self) -> Self:
        self.log.touch()
        for rank in self.ranks:
            rank.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all ranks at once."""
        for rank in self.ranks:
            if rank.is_alive():
                rank.kill()
        for rank in self.ranks:
            rank.join()

    def wait(self, timeout: float = 120.0) -> list[int | None]:
        """Wait for all ranks to end, and return their exit codes; one that was killed leaves the others no chance."""
        end = time.monotonic() + timeout
        while any(rank.is_alive() for rank in self.ranks):
            assert time.monotonic() < end, self.text
            if any(rank.exitcode not in (None, 0) for rank in self.ranks):
                self.kill()
            time.sleep(0.005)
        return [rank.exitcode for rank in self.ranks]

    def kill_when(self, moment: Callable[[], bool], delay: float = 0.0) -> bool:
        """Kill all ranks `delay` seconds after `moment` holds; returns False if the run ended before."""
        end = time.monotonic() + 120
        while not moment():
            assert time.monotonic() < end, self.text
            if not any(rank.is_alive() for rank in self.ranks):
                return False
        time.sleep(delay)
        is_running = any(rank.is_alive() for rank in self.ranks)
        self.kill()
        return is_running

    @property
    def text(self) -> str:
        """What the job has printed so far."""
        return self.log.read_text()


def announced(text: str) -> int:
    """The last step that was saved by what a run has printed, 0 for none."""
    return max((int(step) for step in re.findall(r"^step (\d+): saved ", text, re.M)), default=0)


def resumed(text: str) -> int:
    """The step from which a run goes on by what it has printed."""
    found = re.search(r"^resuming from .* \(step (\d+)\)", text, re.M)
    if found is None:
        assert "no complete checkpoint was found: starting at step 0" in text, text
    return int(found.group(1)) if found else 0


def _run(environment: ProcessEnvironment, path: str, overrides: list[str], log: str, kill_at: int) -> None:
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    killer = Killer(kill_at)
    if environment.is_main:
        sys.addaudithook(killer)
    train(load_recipe(path, overrides), environment=environment)
    if environment.is_main:
        print(f"changes of files: {killer.count}")


def changes(text: str) -> int:
    """How many changes of files there were in a run that came to its end."""
    (number,) = re.findall(r"^changes of files: (\d+)$", text, re.M)
    return int(number)
