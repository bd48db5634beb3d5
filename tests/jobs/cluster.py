"""A cluster of one host: commands that do what Slurm's do, and pods that are processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT

# One task a machine, each in a group of its own, which signals are passed on to; the highest code is the step's.
_SRUN = """\
import os, signal, subprocess, sys
arguments = sys.argv[1:]
options = {}
while arguments[0].startswith("--"):
    name, _, value = arguments.pop(0).partition("=")
    options[name] = value
unknown = set(options) - {"--ntasks-per-node", "--cpus-per-task", "--kill-on-bad-exit", "--wait"}
assert not unknown, unknown
number = int(os.environ["SLURM_NNODES"]) * int(options["--ntasks-per-node"])
step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(number), "SLURM_LOCALID": "0"}
step["SLURM_STEP_NODELIST"] = os.environ["SLURM_JOB_NODELIST"]
tasks = []
def pass_on(received, frame):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, received)
for one in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(one, pass_on)
for rank in range(number):
    env = {**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
    tasks.append(subprocess.Popen(arguments, env=env, start_new_session=True))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
_SCONTROL = """\
import os, pathlib, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
elif sys.argv[1] == "requeue":
    assert sys.argv[2] == os.environ["SLURM_JOB_ID"]
    pathlib.Path(os.environ["FAKE_REQUEUED"]).touch()
else:
    sys.exit(f"scontrol {sys.argv[1:]}")
"""
_KNOWN = {
    *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "partition", "account"),
    *("qos", "constraint", "output", "open-mode", "requeue", "no-requeue", "signal"),
}


def commands(folder: Path) -> dict[str, str]:
    """The environment in which `srun`, `scontrol` and this checkout's `hp-train` are found first."""
    folder.mkdir(parents=True, exist_ok=True)
    python = shlex.quote(sys.executable)
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        source = folder / f"{name}.py"
        source.write_text(text)
        _executable(folder / name, f'exec {python} {shlex.quote(str(source))} "$@"\n')
    _executable(folder / "hp-train", f'exec {python} -m hp_core "$@"\n')
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def directives(script: str) -> dict[str, str]:
    """The options that sbatch takes from a script: those before its first command."""
    found = {}
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        match = re.fullmatch(r"#SBATCH --([\w-]+)(?:=(.*))?", line)
        if match:
            found[match.group(1)] = match.group(2) or ""
    assert set(found) <= _KNOWN
    return found


class Batch:
    """A batch job of the fake Slurm, started again for as long as it asks for it."""

    def __init__(self, script: str, folder: Path, env: Mapping[str, str]) -> None:
        self.options = directives(script)
        self.script = folder / "job.sh"
        self.script.write_text(script)
        self.log = folder / "job.out"
        self.requeued = folder / "requeued"
        nodes = int(self.options["nodes"])
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": str(nodes)}
        hosts = ",".join(["localhost"] * nodes)
        self.env = {**env, **slurm, "SLURM_JOB_NODELIST": hosts, "FAKE_REQUEUED": str(self.requeued)}
        self.starts = 0

    def start(self, when: Callable[[], bool] | None = None, what: signal.Signals = signal.SIGUSR1) -> int:
        """Run the script to its end and return its code; send its shell a signal once `when` holds."""
        self.requeued.unlink(missing_ok=True)
        restarts = {"SLURM_RESTART_COUNT": str(self.starts)} if self.starts else {}
        self.starts += 1
        with self.log.open("a") as log:
            process = subprocess.Popen(
                ["bash", str(self.script)],
                env={**self.env, **restarts},
                cwd=self.script.parent,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            return finish([process], when, what)[0]


def finish(
    processes: Sequence[subprocess.Popen[Any]],
    when: Callable[[], bool] | None = None,
    what: signal.Signals = signal.SIGTERM,
) -> list[int]:
    """Wait for processes, send each a signal once `when` holds, and return their codes; what takes long is killed."""
    end = time.monotonic() + 180
    try:
        while any(one.poll() is None for one in processes):
            assert time.monotonic() < end, "the job did not end"
            if when is not None and when():
                when = None
                for one in processes:
                    one.send_signal(what)
            time.sleep(0.05)
        return [one.returncode for one in processes]
    finally:
        for one in processes:
            kill_tree(one.pid)
            one.wait()


def kill_tree(parent: int) -> None:
    """Kill what is left of a process and of those that it has started."""
    for pid in [parent, *descendants(parent)]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(parent: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after_name = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    found, rest = [], [parent]
    while rest:
        rest += (new := children.get(rest.pop(), []))
        found += new
    return found


def has_taken(run: Path, number: int) -> bool:
    """Whether a run has logged this many steps."""
    try:
        return len(read_metrics(run)) >= number
    except (OSError, ValueError):
        return False


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as in the arguments of a container; `$$` is a plain `$`."""

    def value(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return env.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
