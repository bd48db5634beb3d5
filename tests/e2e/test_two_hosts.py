"""A run on two machines that meet over a network, and one of them going away."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hp_core.config.launch import LaunchConfig
from hp_core.errors import RunError
from hp_core.observe.trackers import read_metrics
from hp_core.parallel.launching import meeting
from hp_core.parallel.launching.meeting import SILENCE_SECONDS
from tests.e2e.hosts import Host, two_hosts
from tests.e2e.ranks import failing, read_until, rest
from tests.e2e.runs import manifest, recipe, steps, train

PORT = 29400
DROPOUT = "--model.config.attention_dropout=0.2"
EVERY = "--checkpoint.save_every=2"
RANKS = (["--node-rank=0"], ["--node-rank=1"])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as made:
        yield made


def arguments(hosts: tuple[Host, Host], path: Path, *more: str, nnodes: str = "2") -> list[str]:
    """The same command for each machine."""
    return [str(path), "--nnodes", nnodes, "--rdzv-endpoint", f"{hosts[0].name}:{PORT}", DROPOUT, EVERY, *more]


@contextmanager
def running(
    hosts: tuple[Host, Host], command: list[str], *each: list[str]
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """The command on both machines, with arguments that only one of them gets."""
    ours, theirs = each or ([], [])
    with hosts[0].hp_train(*command, *ours) as left, hosts[1].hp_train(*command, *theirs) as right:
        yield left, right


def waiting(gate: Path) -> str:
    """A loss that waits at its ninth call of a first attempt until a file is there."""
    return f"--loss_fn={{_target_: tests.e2e.parts.GatedLoss, call: 9, gate: {gate}}}"


def rows(run: Path) -> list[Any]:
    return steps(read_metrics(run))


def test_two_machines_train_as_two_processes_of_one(tmp_path, hosts):
    path = recipe(tmp_path)
    train(path, DROPOUT, EVERY, nproc=2, out=tmp_path / "plain")
    # The second machine is asked to be the first: it has rank 0, which writes and speaks.
    with running(hosts, arguments(hosts, path), ["--node-rank=1"], ["--node-rank=0"]) as (left, right):
        texts = [rest(left, within=60), rest(right, within=60)]
        assert [left.returncode, right.returncode] == [0, 0], texts
    assert rows(tmp_path / "run") == rows(tmp_path / "plain")
    assert "step 6/6" in texts[1]
    assert texts[0] == ""


def test_the_first_cause_on_any_machine_is_told_on_each(tmp_path, hosts):
    path = recipe(tmp_path)
    with running(hosts, arguments(hosts, path, failing("raise", rank=1, call=3)), *RANKS) as (left, right):
        texts = [rest(left, within=60), rest(right, within=60)]
        assert [left.returncode, right.returncode] == [1, 1], texts
        assert [host.processes() for host in hosts] == [[], []]
    for text in texts:
        told = r"error: rank 1 on right, step 2, samples \d+:\nTraceback [^$]*\nRuntimeError: the loss broke\n"
        assert len(re.findall(told, text)) == text.count("error: ") == 1, text
        assert "(1 other rank ended because of it)" in text


@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_on_one_machine_stops_both(tmp_path, hosts, number):
    path = recipe(tmp_path)
    with running(hosts, arguments(hosts, path, "--training.train_iters=50000"), *RANKS) as processes:
        read_until(processes[0], "step 3/")
        processes[number].terminate()
        texts = [rest(one, within=60) for one in processes]
        assert [one.returncode for one in processes] == [75, 75], texts
    match = re.search(r"stopped after step (\d+)", texts[0])
    assert match is not None, texts
    assert (tmp_path / "run" / "checkpoints" / f"step_{int(match[1]):08d}").is_dir()


@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_a_machine_that_goes_is_replaced(tmp_path, hosts, how):
    """Whatever starts the command there again, the run is the unbroken one, bit for bit."""
    path = recipe(tmp_path)
    train(path, DROPOUT, EVERY, nproc=2, out=tmp_path / "plain")
    command = arguments(hosts, path, waiting(tmp_path / "gate"), "--max-restarts=1")
    with running(hosts, command, *RANKS) as (left, right):
        begun = read_until(left, "step 4: saved")
        if how == "unplugged":
            hosts[1].unplug()
        hosts[1].kill()
        right.communicate()
        told = read_until(left, "error: ")
        hosts[1].plug_in()
        with hosts[1].hp_train(*command, "--node-rank=1") as again:
            texts = [begun + told + rest(left, within=60), rest(again, within=60)]
            assert [left.returncode, again.returncode] == [0, 0], texts
    if how == "unplugged":
        assert f"error: machine right has not been heard of for {SILENCE_SECONDS:g} s" in texts[0]
    else:
        assert "right" in told
    assert texts[0].count("attempt 2 of 2: going on from the newest checkpoint") == 1
    assert "(step 4)" in texts[0]
    assert rows(tmp_path / "run") == rows(tmp_path / "plain")


def test_the_others_go_on_without_a_machine_if_fewer_will_do(tmp_path, hosts):
    path = recipe(tmp_path)
    train(path, DROPOUT.replace("0.2", "0"), EVERY, nproc=2, out=tmp_path / "plain")
    command = arguments(hosts, path, waiting(tmp_path / "gate"), "--max-restarts=1", nnodes="1:2")
    command[command.index(DROPOUT)] = DROPOUT.replace("0.2", "0")
    with running(hosts, command, *RANKS) as (left, right):
        read_until(left, "step 4: saved")
        hosts[1].kill()
        right.communicate()
        text = rest(left, within=90)
        assert left.returncode == 0, text
    assert "(step 4)" in text
    assert manifest(tmp_path / "run")["world"]["size"] == 1
    assert rows(tmp_path / "run") == pytest.approx(rows(tmp_path / "plain"), rel=1e-5)


def test_the_machine_where_they_meet_goes(tmp_path, hosts):
    path = recipe(tmp_path)
    command = arguments(hosts, path, waiting(tmp_path / "gate"), "--max-restarts=1")
    with running(hosts, command, ["--node-rank=1"], ["--node-rank=0"]) as (left, right):
        read_until(right, "step 4: saved")
        hosts[0].kill()
        left.communicate()
        text = rest(right, within=30)
        assert right.returncode == 1, text
        assert hosts[1].processes() == []
    assert text.count("error: ") == 1, text
    assert f"{hosts[0].name}:{PORT}" in text


def test_a_machine_that_nobody_waits_for_says_so(monkeypatch):
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(meeting, "_CONNECT_SECONDS", 0.5)
    # An address for documentation: it is nobody's.
    with pytest.raises(RunError, match=r"^no machine answers at launch.rdzv_endpoint '192.0.2.1:29400'; start the run"):
        meeting.Meeting(LaunchConfig(nnodes=2, rdzv_endpoint="192.0.2.1:29400"))


def test_a_machine_that_comes_late_leaves_the_others_at_work(tmp_path, hosts):
    path = recipe(tmp_path)
    command = arguments(hosts, path, waiting(tmp_path / "gate"), nnodes="1:2")
    with hosts[0].hp_train(*command) as left:
        read_until(left, "step 2: saved")
        with hosts[1].hp_train(*command):
            time.sleep(25)
            (tmp_path / "gate").touch()
            text = rest(left, within=60)
            assert left.returncode == 0, text
    assert "attempt" not in text
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2, 3, 4, 5, 6]
