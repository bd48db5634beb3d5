"""torchrun's line is a command that trains, on one machine and on two."""

from __future__ import annotations

import shlex
import subprocess

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train_here, recipe, steps
from tests.jobs.cluster import commands, finish, free_port


def printed(path, *arguments: str) -> str:
    done = hp_train_here("launch", "torchrun", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


def run(line: str, folder, number: int = 1) -> list[int]:
    """The line in a shell on each of some machines."""
    with (folder / "out").open("a") as log:
        shells = [
            subprocess.Popen(
                ["bash", "-c", line],
                env=commands(folder / "bin"),
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for _ in range(number)
        ]
        return finish(shells)


def test_the_line_of_one_machine_trains(tmp_path):
    folder = tmp_path / "it's $(here)"
    folder.mkdir()
    line = printed(recipe(folder), "--nproc", "2", "--training.train_iters=2")
    assert run(line, tmp_path) == [0], (tmp_path / "out").read_text()
    assert steps(read_metrics(folder / "run"), "step") == [1, 2]


def test_the_same_line_on_two_machines_trains(tmp_path):
    meeting = f"localhost:{free_port()}"
    line = printed(recipe(tmp_path), "--nodes", "2", "--rdzv-endpoint", meeting, "--training.train_iters=2")
    assert run(line, tmp_path, 2) == [0, 0], (tmp_path / "out").read_text()
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2]


def test_restarts_go_on_from_the_newest_checkpoint(tmp_path):
    path = recipe(tmp_path)
    words = shlex.split(printed(path, "--launch.max_restarts=2", "--output_dir=null"))
    assert "--max-restarts=2" in words
    assert words[-2:] == ["--checkpoint.resume=latest", "--output_dir=runs/tiny"]
    assert "--max-restarts" not in printed(path)


def test_a_port_is_added_where_none_is_given(tmp_path):
    sizes = ("--nodes", "2", "--name", "it", "--rdzv-endpoint")
    for given, wanted in (("a", "a:29500"), ("a:7", "a:7"), ("[::1]", "[::1]:29500"), ("[::1]:7", "[::1]:7")):
        words = shlex.split(printed(recipe(tmp_path), *sizes, given))
        assert {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=it", f"--rdzv-endpoint={wanted}"} < set(words)
