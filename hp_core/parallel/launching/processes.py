"""The processes of one attempt on this machine: started together, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Processes:
    """The ranks on this machine, each the leader of a session of its own so that its children end with it."""

    def __init__(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        self._is_killed = False
        self._ranks = {
            rank: subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True)
            for rank, env in environments.items()
        }

    @property
    def pids(self) -> dict[int, int]:
        """The process ids by rank."""
        return {rank: process.pid for rank, process in self._ranks.items()}

    def ended(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended; a signal's number is negative."""
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        ended = self.ended()
        return [rank for rank in self._ranks if rank not in ended]

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ranks, to all of them by default, but not to their children."""
        for rank in self.alive() if ranks is None else ranks:
            self._ranks[rank].send_signal(number)

    def state(self, rank: int) -> str:
        """The kernel's letter for what a rank is doing: T if it is stopped, D if it waits for a device; or nothing."""
        with suppress(OSError):
            # The name of the program, in parentheses, may have spaces.
            return Path(f"/proc/{self._ranks[rank].pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""

    def kill(self) -> None:
        """End all ranks and their children now, also those of ranks that have ended, and wait for them."""
        if self._is_killed:
            # Their numbers may be those of other processes by now.
            return
        self._is_killed = True
        for process in self._ranks.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._ranks.values():
            with suppress(subprocess.TimeoutExpired):
                # One that waits for a device in the kernel can't be ended; it must not hold up the rest.
                process.wait(timeout=10)
