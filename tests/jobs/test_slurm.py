"""Batch scripts are run by a Slurm that starts the processes, asks them to stop, and queues the job again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train_here, recipe, steps
from tests.jobs.cluster import Batch, commands, directives, has_taken

SLOW = """\
import time

from hp_core import hookimpl


@hookimpl
def on_step_end(run, step):
    time.sleep(0.3)
"""
SETTINGS = ("--training.train_iters=8", "--training.device=cpu", "--model.config.attention_dropout=0.2")


def printed(path: Path, *arguments: str) -> str:
    done = hp_train_here("launch", "slurm", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def slow_recipe(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "slow.py").write_text(SLOW)
    return recipe(folder, extra="plugins: [./slow.py]\n")


@pytest.mark.parametrize(
    ("nodes", "nproc"), [(1, 1), (2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 2), (2, 1)))]
)
def test_a_job_stops_before_its_time_is_over_and_goes_on_when_it_starts_again(tmp_path, nodes, nproc):
    folder = tmp_path / 'it\'s a $HOME of "jobs"'
    path = slow_recipe(folder)
    sizes = ("--nodes", str(nodes), "--nproc", str(nproc), "--workdir", str(folder))
    script = printed(path, *sizes, "--name", "odd", "--time", "10", *SETTINGS)
    job = Batch(script, tmp_path, commands(tmp_path / "bin"))
    assert job.options["signal"] == "B:USR1@300"
    run = folder / "run"
    code = job.start(when=lambda: has_taken(run, 2))
    assert code == 0, job.log.read_text()
    assert job.requeued.exists(), job.log.read_text()
    first = read_metrics(run)
    assert 2 <= len(first) < 8
    assert job.start() == 0, job.log.read_text()
    assert not job.requeued.exists()
    rows = read_metrics(run)
    assert steps(rows, "step") == list(range(1, 9))
    assert rows[: len(first)] == first
    text = job.log.read_text()
    assert f"(step {len(first)})" in text
    assert "stopped with code 75: job" in text


def test_what_goes_on_is_the_same_run(tmp_path):
    path = slow_recipe(tmp_path / "a")
    script = printed(path, "--workdir", str(tmp_path), "--no-requeue", *SETTINGS, "--training.stop_after=3")
    job = Batch(script, tmp_path, commands(tmp_path / "bin"))
    assert "no-requeue" in job.options
    assert job.start() == 0, job.log.read_text()
    assert steps(read_metrics(tmp_path / "a" / "run"), "step") == [1, 2, 3]


@pytest.mark.parametrize(
    ("ending", "code", "is_requeued"),
    [
        # A command in the place of srun: what it does when it is asked to stop, and what comes of it.
        ("trap 'sleep 0.2; exit 75' USR1", 0, True),
        ("trap 'exit 0' USR1", 0, False),
        ("trap 'exit 1' USR1", 1, False),
        ("trap - USR1", 0, True),
    ],
    ids=["saved", "done", "failed", "not listening yet"],
)
def test_only_what_was_stopped_goes_back_into_the_queue(tmp_path, ending, code, is_requeued):
    job = fake_training(tmp_path, ending)
    assert job.start(when=(tmp_path / "ready").exists) == code
    assert job.requeued.exists() == is_requeued


def test_a_cancelled_job_may_save_and_is_not_started_again(tmp_path):
    job = fake_training(tmp_path, "(sleep 0.5; exit 75) & wait $!; exit 75")
    assert job.start(when=(tmp_path / "ready").exists, what=signal.SIGTERM) == 75
    assert not job.requeued.exists()


def test_a_signal_is_passed_on_once(tmp_path):
    job = fake_training(tmp_path, f"trap 'echo got >> {tmp_path}/signals' USR1")
    sent: list[int] = []

    def send_three() -> bool:
        if (tmp_path / "ready").exists() and len(sent) < 3:
            sent.append(int((tmp_path / "shell").read_text()))
            os.kill(sent[-1], signal.SIGUSR1)
        elif (tmp_path / "signals").exists():
            (tmp_path / "end").touch()
        return False

    job.start(when=send_three)
    assert (tmp_path / "signals").read_text() == "got\n"


def fake_training(tmp_path: Path, body: str) -> Batch:
    """A job whose `hp-train` is a shell that says when it runs, and runs for as long as nobody ends it."""
    env = commands(tmp_path / "bin")
    text = f"#!/bin/bash\n{body}\ntouch {tmp_path}/ready\nwhile [ ! -e {tmp_path}/end ]; do sleep 0.05; done\n"
    (tmp_path / "bin" / "hp-train").write_text(text)
    script = printed(recipe(tmp_path), "--workdir", str(tmp_path), "--setup", f"echo $$ > {tmp_path}/shell")
    return Batch(script, tmp_path, env)


def test_the_header_has_what_was_asked_for(tmp_path):
    options = ("--time", "2-12:00:00", "--partition", "gpu,big", "--account", "a@b", "--qos", "low")
    sizes = ("--nodes", "4", "--nproc", "2", "--cpus", "16", "--memory", "64G", "--constraint", "h100&ib")
    values = ("--signal-before", "60", "--training.global_batch_size=8", "--training.device=null")
    script = printed(recipe(tmp_path), *options, *sizes, *values)
    assert directives(script) == {
        "job-name": "tiny",
        "nodes": "4",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "2",
        "mem": "64G",
        "time": "2-12:00:00",
        "partition": "gpu,big",
        "account": "a@b",
        "qos": "low",
        "constraint": "h100&ib",
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": "",
        "signal": "B:USR1@60",
    }
    assert "srun --ntasks-per-node=1 --cpus-per-task=16 " in script
    assert "gpus-per-node" not in directives(printed(recipe(tmp_path), "--training.device=cpu"))


def test_a_run_without_a_directory_gets_one_that_the_job_finds_again(tmp_path):
    script = printed(recipe(tmp_path), "--output_dir=null", "--training.device=cpu", "--setup", "echo() { :; }")
    (tmp_path / "bin").mkdir()
    env = commands(tmp_path / "bin")
    (tmp_path / "bin" / "hp-train").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/arguments\n')
    job = Batch(script, tmp_path, env)
    for _ in range(2):
        assert job.start() == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments.count(f"--output_dir=runs/tiny-{job.env['SLURM_JOB_ID']}") == 2
    assert arguments.count("--checkpoint.resume=latest") == 2
