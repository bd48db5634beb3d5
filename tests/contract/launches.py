"""What the keys of `launch` do: which processes are started, where they meet, and what happens when one fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from hp_core.config.launch import LaunchConfig
from hp_core.parallel.launching.meeting import Meeting
from tests.conftest import ROOT
from tests.e2e.runs import hp_train, manifest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_on(*machines: list[str]) -> list[str]:
    """What `hp-train` says on each machine, all of which are this one; they all have to end well."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "hp_core", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in machines
    ]
    try:
        outputs = [one.communicate(timeout=180)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0] * len(started), outputs
    return outputs


def processes(bench: Any) -> bool:
    out = bench.tmp_path / "launched"
    done = hp_train(str(bench.recipe), "--launch.nproc=2", f"--output_dir={out}")
    return done.returncode == 0 and manifest(out)["world"]["size"] == 2


def machines(bench: Any) -> bool:
    out = bench.tmp_path / "machines"
    arguments = [str(bench.recipe), "--launch.nnodes=2", f"--launch.rdzv_endpoint=localhost:{free_port()}"]
    run_on(*[[*arguments, f"--output_dir={out}"]] * 2)
    return manifest(out)["world"]["size"] == 2


def places(bench: Any) -> bool:
    """The machine that is number 0 has rank 0, which speaks, whichever comes first."""
    told = []
    for first in (0, 1):
        endpoint = f"--launch.rdzv_endpoint=localhost:{free_port()}"
        arguments = [str(bench.recipe), "--launch.nnodes=2", endpoint, f"--output_dir={bench.tmp_path / str(first)}"]
        outputs = run_on(*([*arguments, f"--launch.node_rank={rank}"] for rank in (first, 1 - first)))
        told.append(["step 2/2" in output for output in outputs])
    return told == [[True, False], [False, True]]


def sizes_of_meetings(*ids: str) -> list[int]:
    """How many machines meet whom, when one comes for each id."""
    endpoint = f"localhost:{free_port()}"
    sizes: list[int] = []

    def meet(run_id: str) -> None:
        meeting = Meeting(LaunchConfig(nnodes="1:2", rdzv_endpoint=endpoint, rdzv_id=run_id))
        meeting.next_rendezvous()
        sizes.append(meeting.size)
        met.wait(timeout=60)
        meeting.shutdown()

    met = threading.Barrier(len(ids))
    threads = [threading.Thread(target=meet, args=(one,)) for one in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sizes


def restarts(bench: Any) -> bool:
    loss = "--loss_fn={_target_: tests.e2e.parts.FailingLoss, rank: 0, call: 2, how: raise}"

    def code(number: int) -> int:
        out = f"--output_dir={bench.tmp_path / f'again{number}'}"
        return hp_train(str(bench.recipe), loss, f"--launch.max_restarts={number}", out).returncode

    return [code(number) for number in (0, 1)] == [1, 0]


def refuses_unknown_host(bench: Any) -> bool:
    outcome = bench.run("--launch.nnodes=2", "--launch.rdzv_endpoint=nowhere.invalid:29400")
    return outcome.code == 1 and "host 'nowhere.invalid' can't be found" in outcome.output


LAUNCH_KEYS: dict[str, Callable[[Any], bool]] = {
    "launch.nproc": processes,
    "launch.nnodes": machines,
    "launch.node_rank": places,
    "launch.rdzv_endpoint": refuses_unknown_host,
    "launch.rdzv_id": lambda bench: (
        sizes_of_meetings("one", "one") == [2, 2] and sizes_of_meetings("one", "another") == [1, 1]
    ),
    "launch.max_restarts": restarts,
}
