"""One run on this machine, from the recipe's `launch` section to an exit code."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousError

from hp_core.config.launch import LaunchConfig
from hp_core.errors import EXIT_DONE, EXIT_STOPPED, RunError
from hp_core.parallel.launching.agent import RankAgent
from hp_core.parallel.launching.meeting import Meeting, interface_of
from hp_core.parallel.launching.records import LaunchFolder
from hp_core.parallel.setup import default_threads


def launch(command: list[str], config: LaunchConfig) -> int:
    """Run `command` in the processes that the recipe asks for, and return the exit code of the run.

    The rank that failed first speaks, once; what follows from it in the other ranks is not shown.

    Raises:
        HpError: the machines don't meet.
    """
    _quieten_the_launcher()
    os.environ.setdefault("OMP_NUM_THREADS", str(default_threads(config.nproc)))
    with tempfile.TemporaryDirectory(prefix="hp-train-") as folder:
        meeting = Meeting(config)
        _choose_interface(meeting.address)
        spec = WorkerSpec(
            role="default",
            local_world_size=config.nproc,
            rdzv_handler=meeting,
            entrypoint=command[0],
            max_restarts=config.max_restarts,
            monitor_interval=0.1,
        )
        agent = RankAgent(spec, command, LaunchFolder(Path(folder)), meeting, config.timeout)
        with _told_of_the_meeting(meeting), agent.signals:
            agent.run()
        code = _code(agent)
        meeting.leave()
        meeting.shutdown()
        return code


def _code(agent: RankAgent) -> int:
    """What to exit with, after telling why."""
    if agent.cause is None:
        return EXIT_STOPPED if agent.has_stopped else EXIT_DONE
    asked = agent.signals.asked
    if asked is not None and agent.was_interrupted:
        return agent.leave(asked)
    print(agent.cause.told(agent.num_others), file=sys.stderr)
    return agent.cause.code


@contextmanager
def _told_of_the_meeting(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except RendezvousClosedError:
        raise RunError("the run has ended on another machine, which tells why") from None
    except (dist.DistError, RendezvousConnectionError) as error:
        if meeting.is_alone:
            raise
        raise RunError(
            f"nobody answers at launch.rdzv_endpoint {str(meeting.endpoint)!r} any more: that machine, or the network, "
            "is down; start the run again on all machines, with --checkpoint.resume=latest"
        ) from error
    except RendezvousError as error:
        raise RunError(f"launch.rdzv_endpoint {str(meeting.endpoint)!r}: {error}") from error


def _choose_interface(address: str | None) -> None:
    """Have gloo listen where other machines reach this one; it would look up the host's name, often a loopback."""
    name = interface_of(address) if address is not None else None
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _quieten_the_launcher() -> None:
    """Keep the elastic agent's own account of a failure off the terminal: the first cause is told once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
