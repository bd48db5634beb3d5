"""The agent of this machine: torch's elastic agent, with processes and failures of our own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState

from hp_core.checkpoint.layout import search
from hp_core.errors import EXIT_RUN_FAILED, EXIT_STOPPED, EXIT_USER_INPUT
from hp_core.parallel.launching.causes import first_cause
from hp_core.parallel.launching.meeting import SILENCE_SECONDS, Meeting
from hp_core.parallel.launching.processes import Processes
from hp_core.parallel.launching.records import LAUNCH_DIR, LAUNCHER_PID, Failure, LaunchFolder
from hp_core.parallel.launching.signals import LauncherSignals


class RankAgent(SimpleElasticAgent):
    """Starts the ranks of this machine, watches them, and starts over when one fails and the recipe allows it.

    `cause` says why the last attempt failed. `signals` is who was asked to stop.
    """

    def __init__(
        self, spec: WorkerSpec, command: Sequence[str], folder: LaunchFolder, meeting: Meeting, timeout: float
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=60)
        self._command = command
        self._folder = folder
        self._meeting = meeting
        self._timeout = timeout
        self._processes: Processes | None = None
        self._starting = threading.Lock()
        self.cause: Failure | None = None
        self.num_others = 0
        self._run_directory: Path | None = None
        self.signals = LauncherSignals(self._forward, self._end_now)

    @property
    def has_stopped(self) -> bool:
        """Whether the ranks of this machine have stopped on request, with a complete checkpoint."""
        return self._processes is not None and self._folder.stopped() == set(self._processes.pids)

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal that was passed on ended ranks which did not heed it yet."""
        assert self._processes is not None
        asked = self.signals.asked or 0
        return any(code in (-asked, 128 + asked) for code in self._processes.ended().values())

    def leave(self, number: int) -> int:
        """Say that a signal came while no rank was training, and return the code to exit with.

        An earlier attempt may have saved: then the run is one that has stopped, and can be gone on with.
        """
        newest = search(self._run_directory).newest if self._run_directory is not None else None
        if newest is None:
            print("interrupted before training began", file=sys.stderr)
            return 128 + number
        told = f"stopped between two attempts, after step {newest.step}"
        print(f"{told}; --checkpoint.resume=latest goes on from there", file=sys.stderr)
        return EXIT_STOPPED

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._starting:
            # While machines meet there is nobody to pass a signal on to.
            self._processes = None
            if self.signals.asked is not None:
                self._leave(self.signals.asked)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        if self._meeting.attempt and self._meeting.rank == 0:
            number = f"attempt {self._meeting.attempt + 1} of {spec.max_restarts + 1}"
            print(f"{number}: going on from the newest checkpoint", file=sys.stderr)
        self._folder.clear()
        self.cause = None
        environments = {
            worker.global_rank: self._environment(worker_group, index)
            for index, worker in enumerate(worker_group.workers)
        }
        with self._starting:
            self._processes = Processes(self._command, environments)
        return {worker.local_rank: self._processes.pids[worker.global_rank] for worker in worker_group.workers}

    def _environment(self, group: WorkerGroup, index: int) -> dict[str, str]:
        worker, spec = group.workers[index], group.spec
        return {
            LAUNCH_DIR: str(self._folder.path),
            LAUNCHER_PID: str(os.getpid()),
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(group.group_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._meeting.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._processes is not None
        ended = self._processes.ended()
        lost = self._meeting.lost()
        if any(ended.values()) or lost is not None:
            return self._failed(worker_group.spec, lost)
        if len(ended) == len(worker_group.workers):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ended))
        return RunResult(WorkerState.HEALTHY)

    def _failed(self, spec: WorkerSpec, lost: str | None) -> RunResult:
        assert self._processes is not None
        if lost is not None:
            text = f"machine {lost} has not been heard of for {SILENCE_SECONDS:g} s: it, or the network, is down"
            own = Failure(-1, EXIT_RUN_FAILED, text, time.time())
        else:
            own = first_cause(self._processes, self._folder, self._timeout)
        self._processes.kill()
        self.cause = self._meeting.tell(own)
        alike = [one for one in self._folder.failures().values() if one.text == self.cause.text]
        self.num_others = self._worker_group.workers[0].world_size - max(1, len(alike))
        self._remaining_restarts = self._restarts_left(spec)
        if self._remaining_restarts:
            self._run_directory = self._meeting.run_directory()
            print(self.cause.told(self.num_others), file=sys.stderr)
        return RunResult(WorkerState.FAILED)

    def _restarts_left(self, spec: WorkerSpec) -> int:
        """How often the run may start over, this time included: never after a mistake of the user's, or a signal."""
        assert self.cause is not None
        # Counted over all machines; what the agent of one machine has counted may be fewer.
        num_failures = self._meeting.count_failure()
        if self.cause.code == EXIT_USER_INPUT or self.signals.asked is not None:
            return 0
        return max(0, spec.max_restarts - num_failures + 1)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # What could be saved has been: ranks that are left after a failure wait for one that is gone.
        if self._processes is not None:
            self._processes.kill()

    def _forward(self, number: int) -> None:
        with self._starting:
            if self._processes is None:
                self._leave(number)
            self._processes.send(number)

    def _leave(self, number: int) -> NoReturn:
        code = self.leave(number)
        self._folder.remove()
        os._exit(code)

    def _end_now(self) -> None:
        if self._processes is not None:
            self._processes.kill()
        self._folder.remove()
