"""One rank of several fails in some way: all are gone within seconds, and the first cause is told once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT
from tests.e2e.ranks import failing, read_until, rest
from tests.e2e.runs import captured, recipe, steps


@contextmanager
def started(path: Path, *arguments: str, nproc: int = 2) -> Iterator[subprocess.Popen[str]]:
    """`hp-train` on several ranks, in a session of its own; all of it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hp_core", str(path), *arguments, "--nproc", str(nproc)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ranks: list[int] = []
    try:
        yield process
    finally:
        ranks = children(process.pid)
        for pid in (*ranks, process.pid):
            if process.poll() is None or pid != process.pid:
                os.killpg(pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("raise", 1, r"error: rank 1, step 2, samples \d+:\nTraceback [^$]*\nRuntimeError: the loss broke"),
        ("refuse", 2, "the loss refuses"),
        ("SIGKILL", 1, r"error: rank 1(, step 2)? was ended by SIGKILL, by the kernel if memory ran out"),
        ("SIGABRT", 1, r'error: rank 1(, step 2)? was ended by SIGABRT[^$]*parts.py", line \d+ in fail\n'),
        ("exit3", 1, r"error: rank 1(, step 2)? ended with code 3, without a word"),
        ("exit0", 1, r"error: rank 1(, step 2)? ended with code 0, before the run did"),
        (
            "hang",
            1,
            r'error: rank 1, step 2 did not come within 4 s \(launch.timeout\)[^$]*parts.py", line \d+ in fail\n',
        ),
        ("SIGSTOP", 1, r"error: rank 1, step 2 did not come within 4 s [^$]*it is stopped, by SIGSTOP or a debugger"),
    ],
)
def test_the_first_cause_is_told_once_and_nothing_is_left(tmp_path, how, code, told):
    with started(recipe(tmp_path), failing(how), "--launch.timeout=4") as process:
        read_until(process, "step 1/")
        text = rest(process)
    assert process.returncode == code, text
    assert len(re.findall(told, text)) == 1, text
    assert text.count("error: ") == (code == 1)
    assert text.count("(1 other rank ended because of it)") == (code == 1)
    assert not re.search(r"gloo|Connection|peer", text)


@pytest.mark.parametrize("where", ["data", "save"])
def test_wherever_it_fails(tmp_path, where):
    arguments = {
        "data": "--dataset={_target_: tests.e2e.parts.rows_that_break, rank: 1, start: 5}",
        "save": "--checkpoint.save_every=2",
    }
    extra = [f"--plugin={ROOT / 'tests' / 'e2e' / 'breaks_at_save.py'}"] if where == "save" else []
    with started(recipe(tmp_path), arguments[where], *extra, "--dataloader.num_workers=1") as process:
        read_until(process, "run directory")
        text = rest(process, within=40)
    assert process.returncode == 1, text
    assert text.count(f"RuntimeError: the {where} broke") == 1, text
    assert text.count("error: ") == 1
    told = {
        "data": r"error: rank 1, step \d, reading .*\b(\d+)\b[^$]*the data broke at row \1\n",
        "save": "error: rank 0, saving after step 2: plugin ",
    }
    assert re.search(told[where], text), text


def test_a_killed_worker_or_rank_takes_everything_with_it(tmp_path):
    path = recipe(tmp_path)
    # Whichever notices first: the loader at its pipe, or torch's handler of SIGCHLD anywhere in a step.
    loader = r"rank 1, step \d+, reading [^$]*worker process of the data loader was ended by SIGKILL, by the kernel"
    handler = r"rank 1, step \d+[^$]*DataLoader worker \(pid \d+\) is killed by signal: Killed"
    for whom, told in (
        ("worker", f"(?:{loader}|{handler})"),
        ("rank", "rank 1(, step \\d+)? was ended by SIGKILL"),
    ):
        arguments = ("--training.train_iters=50000", "--dataloader.num_workers=1", f"--output_dir={tmp_path / whom}")
        with started(path, *arguments) as process:
            read_until(process, "step 3/")
            rank = children(process.pid)[1]
            os.kill(children(rank)[0] if whom == "worker" else rank, signal.SIGKILL)
            text = rest(process)
        assert process.returncode == 1
        assert len(re.findall(f"error: {told}", text)) == text.count("error: ") == 1, text


@pytest.mark.parametrize("whom", ["launcher", "one rank", "all processes"])
def test_a_signal_saves_and_exits_75(tmp_path, whom):
    numbers = {"launcher": signal.SIGTERM, "one rank": signal.SIGUSR1, "all processes": signal.SIGTERM}
    path = recipe(tmp_path)
    with started(path, "--training.train_iters=50000", "--dataloader.num_workers=1") as process:
        read_until(process, "step 3/")
        ranks = children(process.pid)
        workers = [worker for rank in ranks for worker in children(rank)]
        assert len(workers) == 2
        pids = {"launcher": [process.pid], "one rank": ranks[1:], "all processes": [*workers, *ranks, process.pid]}
        for pid in pids[whom]:
            os.kill(pid, numbers[whom])
        text = rest(process)
    assert process.returncode == 75, text
    match = re.search(r"stopped after step (\d+)", text)
    assert match is not None
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{int(match[1]):08d}"]
    assert "error" not in text


def test_ctrl_c_twice_ends_at_once(tmp_path):
    with started(recipe(tmp_path), "--training.train_iters=50000", failing("hang", call=7)) as process:
        read_until(process, "hanging")
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        text = rest(process, within=5)
    assert process.returncode == 130, text
    assert text.endswith("SIGINT again: ended at once\n")


def test_a_signal_before_training_began(tmp_path):
    with started(recipe(tmp_path), "--dataset={_target_: tests.e2e.parts.slow_rows}") as process:
        read_until(process, "plan:")
        process.send_signal(signal.SIGTERM)
        text = rest(process)
    assert process.returncode == 143, text
    assert text.strip().endswith("interrupted before training began")


def test_a_restart_goes_on_as_if_nothing_had_been(tmp_path):
    path = recipe(tmp_path, extra="checkpoint: {save_every: 2}\n")
    arguments = ["--model.config.attention_dropout=0.2", f"--output_dir={tmp_path / 'plain'}"]
    with started(path, *arguments) as process:
        rest(process, within=60)
    assert process.returncode == 0
    with started(path, arguments[0], failing("SIGKILL", call=9), "--max-restarts=2", "--overwrite") as process:
        text = rest(process, within=60)
    assert process.returncode == 0, text
    assert text.count("error: rank 1, step 5 was ended by SIGKILL") == 1
    assert text.count("attempt 2 of 3: going on from the newest checkpoint") == 1
    assert "resuming from" in text
    assert "(step 4)" in text
    rows, plain = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "plain")
    assert steps(rows, "step") == [1, 2, 3, 4, 5, 6]
    assert steps(rows) == steps(plain)


def test_a_restart_without_a_checkpoint_starts_in_the_same_directory(tmp_path):
    path = recipe(tmp_path)
    arguments = (failing("raise", call=3), "--max-restarts=1", "--output_dir=null")
    process = subprocess.run(
        [sys.executable, "-m", "hp_core", str(path), *arguments, "--nproc", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert steps(read_metrics(run), "step") == [1, 2, 3, 4, 5, 6]
    assert process.stderr.count("RuntimeError: the loss broke") == 1


def test_restarts_are_counted_and_a_user_s_mistake_gets_none(tmp_path):
    path = recipe(tmp_path)
    loss = "--loss_fn={_target_: tests.e2e.parts.FailingLoss, rank: 0, call: 1, how: exit7, attempts: 9}"
    with started(path, loss, "--max-restarts=1") as process:
        text = rest(process, within=60)
    assert process.returncode == 1
    assert text.count("ended with code 7") == 2
    assert text.count("attempt ") == 1
    with started(path, failing("refuse", call=1), "--max-restarts=1", "--overwrite") as process:
        text = rest(process, within=60)
    assert process.returncode == 2
    assert "attempt" not in text


def test_a_restart_passes_over_the_broken_checkpoint_that_the_first_attempt_did(tmp_path):
    """Nothing of its own is saved yet, so it sets out from where the first one did."""
    path = recipe(tmp_path)
    with started(path, "--checkpoint.save_every=2", "--training.stop_after=4", nproc=1) as process:
        rest(process, within=60)
    (shard,) = (tmp_path / "run" / "checkpoints" / "step_00000004").glob("*.distcp")
    shard.write_bytes(b"")
    out = tmp_path / "other"
    arguments = (f"--checkpoint.resume={tmp_path / 'run'}", f"--output_dir={out}", failing("exit7", rank=0, call=6))
    arguments += ("--checkpoint.allow_plugin_changes=true",)
    with started(path, *arguments, "--max-restarts=1", nproc=1) as process:
        text = rest(process, within=60)
    assert process.returncode == 0, text
    assert text.count("attempt 2 of 2") == 1, text
    assert steps(read_metrics(out), "step") == [3, 4, 5, 6]


@pytest.mark.parametrize("moment", ["ending", "meeting", "building"])
@pytest.mark.parametrize(("every", "code"), [(2, 75), (0, 143)], ids=["saved", "not saved"])
def test_a_signal_between_two_attempts_is_heeded(tmp_path, moment, every, code):
    """Nobody trains who could stop, but a checkpoint of the attempt before may be there to go on from."""
    path = recipe(tmp_path)
    arguments = (f"--checkpoint.save_every={every}", failing("exit7", rank=0, call=13), "--max-restarts=1")
    driver = [sys.executable, "-m", "tests.e2e.signalled_launcher", moment, str(path), *arguments]
    done = captured(driver)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("ended with code 7") == 1
    assert done.stderr.count("attempt 2 of 2") == (moment == "building")
    told = {75: "stopped between two attempts, after step 2; --checkpoint.resume=latest goes on from there"}
    assert done.stderr.splitlines()[-1] == told.get(code, "interrupted before training began")
    assert steps(read_metrics(tmp_path / "run"), "step") == [1, 2, 3]
