"""The command line that starts a recipe under torchrun, the same on every machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hp_core.errors import Problem
from hp_core.jobs.job import Job, contradictions, fitting, resuming

if TYPE_CHECKING:
    from hp_core.config.models import TrainerConfig

PORT = 29500
_LARGEST_PORT = 65535
_ENDPOINT = r"[^\s:]+(:[0-9]+)?|\[[0-9a-fA-F:]+\](:[0-9]+)?"


def faults(endpoint: str | None) -> Iterator[Problem]:
    """Yield what keeps the line from working, whatever the recipe says."""
    yield from fitting(endpoint, "--rdzv-endpoint", _ENDPOINT, "HOST or HOST:PORT")
    port = _port(endpoint)
    if port is not None and not 0 < port <= _LARGEST_PORT:
        message = f"--rdzv-endpoint {endpoint!r}: {port} is no port"
        yield Problem(message, hint=f"write a number from 1 to {_LARGEST_PORT}, or leave it out for {PORT}")


def problems(job: Job, config: TrainerConfig, endpoint: str | None) -> Iterator[Problem]:
    """Yield what keeps the line from training this recipe, rather than any."""
    yield from contradictions(job, config)
    if job.nodes > 1 and endpoint is None:
        message = f"{job.nodes} machines need a place to meet"
        yield Problem(message, hint=f"give --rdzv-endpoint HOST:{PORT}, HOST being one of them")
    if job.nodes == 1 and endpoint is not None:
        yield Problem(f"--rdzv-endpoint {endpoint}: one machine meets nobody", hint="give --nodes, or leave it out")


def added(job: Job, config: TrainerConfig) -> dict[str, str]:
    """The recipe values that the line adds to the user's; none where nothing starts the job again."""
    return resuming(job, config, f"runs/{job.name}") if job.resumes else {}


def command_line(job: Job, config: TrainerConfig, endpoint: str | None) -> str:
    """Return the line, with a newline. `job.resumes` stands for `launch.max_restarts`."""
    words = ["torchrun"]
    if job.nodes == 1:
        words.append("--standalone")
    else:
        assert endpoint is not None
        where = f"{endpoint}:{PORT}" if _port(endpoint) is None else endpoint
        words += [f"--nnodes={job.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={where}", f"--rdzv-id={job.name}"]
    words.append(f"--nproc-per-node={job.nproc}")
    words += [f"--max-restarts={config.launch.max_restarts}"] if job.resumes else []
    return shlex.join([*words, "-m", "hp_core", *job.arguments(added(job, config))]) + "\n"


def _port(endpoint: str | None) -> int | None:
    """The port that an endpoint names; None if it names none, or is of no form that has one."""
    match = re.fullmatch(r"(?:[^\s:]+|\[.*\]):([0-9]+)", endpoint or "")
    return None if match is None else int(match.group(1))
