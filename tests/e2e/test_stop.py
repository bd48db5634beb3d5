"""Signals: all ranks stop at the same step, save, and a resumed run is the unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hp_core.checkpoint.layout import complete_checkpoints
from hp_core.checkpoint.saver import Saver
from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError, run_ranks
from tests.conftest import ROOT
from tests.e2e.runs import WITH_COMPONENTS, manifest, recipe, train
from tests.e2e.signalling import pull

RATES = ("tokens_per_second", "tflops_per_second", "mfu")
TIMES = (*RATES, "step_time_s", "data_time_s", "eval_time_s", "test_time_s")
DROPOUT = "--model.config.attention_dropout=0.3"


def stopped_here(environment: Any, path: str, overrides: list[str], trigger: str | None = None) -> tuple[int, bool]:
    """One rank's run; `trigger`.RANK is pulled while a checkpoint is being written."""
    from hp_core.config import load_recipe
    from hp_core.training.session import train

    start = Saver.start

    def saving(self: Saver, contents: Any) -> list[Path]:
        if trigger is not None:
            pull(Path(f"{trigger}.{environment.rank}"))
        return start(self, contents)

    Saver.start = saving  # type: ignore[method-assign]
    report = train(load_recipe(path, overrides), environment=environment)
    return report.steps, report.stopped


def stopped(path: Path, *overrides: str, nproc: int, out: Path, in_save: Path | None = None) -> int:
    """Run until a part of it sends a signal; returns the step at which all ranks have stopped."""
    arguments = [str(path), [*overrides, f"--output_dir={out}"], None if in_save is None else str(in_save)]
    reports = run_ranks(stopped_here, nproc, *arguments, preload=WITH_COMPONENTS, timeout=60)
    assert len(set(reports)) == 1, reports
    steps, was_stopped = reports[0]
    assert was_stopped
    return steps


def numbers(run: Path) -> list[dict[str, Any]]:
    """The rows of a run, but for its times."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in read_metrics(run)]


def check_resumed(path: Path, *overrides: str, nproc: int, out: Path, whole: Path) -> None:
    """A run that goes on from where it was stopped ends as the unbroken one: the same rows, one of each."""
    train(path, *overrides, "--checkpoint.resume=latest", nproc=nproc, out=out)
    assert numbers(out) == numbers(whole)


def loss(trigger: Path, call: int, **settings: Any) -> str:
    given = {"trigger": str(trigger), "call": call, **settings}
    return f"--loss_fn={{_target_: tests.e2e.signalling.SignallingLoss, {_inner(given)}}}"


def rows(trigger: Path, row: int, **settings: Any) -> str:
    given = {"trigger": str(trigger), "row": row, **settings}
    return f"--dataset={{_target_: tests.e2e.signalling.signalling_rows, {_inner(given)}}}"


def _inner(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {str(value).lower() if value is True else value}" for key, value in values.items())


@pytest.fixture
def triggers(tmp_path: Path) -> Path:
    return tmp_path / "trigger"


def arm(triggers: Path, *ranks: int) -> None:
    for rank in ranks:
        Path(f"{triggers}.{rank}").touch()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_in_a_step_stops_after_it(tmp_path, triggers, name):
    path = recipe(tmp_path)
    settings = [loss(triggers, 2 * 4 + 1, number=name), DROPOUT]
    train(path, *settings, out=tmp_path / "whole")
    arm(triggers, 0)
    # The ninth call is the first of step 3.
    assert stopped(path, *settings, nproc=1, out=tmp_path / "run") == 3
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").is_dir()
    check_resumed(path, *settings, nproc=1, out=tmp_path / "run", whole=tmp_path / "whole")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_all_ranks_stop_at_the_same_step(tmp_path, triggers, ranks):
    path = recipe(tmp_path)
    settings = [loss(triggers, 2 * 2 + 1), DROPOUT]
    train(path, *settings, nproc=2, out=tmp_path / "whole")
    arm(triggers, *ranks)
    assert stopped(path, *settings, nproc=2, out=tmp_path / "run") == 3
    check_resumed(path, *settings, nproc=2, out=tmp_path / "run", whole=tmp_path / "whole")


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(("every", "step"), [(2, 2), (0, 5)], ids=["on the way", "at the end"])
def test_an_evaluation_is_broken_off_and_done_when_the_run_goes_on(tmp_path, triggers, nproc, every, step):
    path = recipe(tmp_path)
    settings = [
        loss(triggers, 2, in_training=False),
        *("--dataset.validation_rows=10", f"--evaluation.every={every}", "--training.train_iters=5", DROPOUT),
    ]
    train(path, *settings, nproc=nproc, out=tmp_path / "whole")
    arm(triggers, nproc - 1)
    assert stopped(path, *settings, nproc=nproc, out=tmp_path / "run") == step
    assert not any("eval_loss" in row for row in read_metrics(tmp_path / "run"))
    check_resumed(path, *settings, nproc=nproc, out=tmp_path / "run", whole=tmp_path / "whole")
    assert manifest(tmp_path / "run")["finished"] == 5


@pytest.mark.parametrize("in_background", ["false", "true"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_checkpoint_of_a_broken_off_evaluation_can_be_the_best(tmp_path, triggers, nproc, in_background):
    path = recipe(tmp_path)
    settings = [
        loss(triggers, 2, in_training=False),
        *("--dataset.validation_rows=10", "--evaluation.every=2", DROPOUT),
        *("--checkpoint.save_every=2", "--checkpoint.keep_last=1", f"--checkpoint.async={in_background}"),
        # The loss falls, so that the first evaluation's is among the two largest.
        "--checkpoint.keep_best={metric: eval_loss, mode: max, count: 2}",
    ]
    train(path, *settings, nproc=nproc, out=tmp_path / "whole")
    arm(triggers, nproc - 1)
    assert stopped(path, *settings, nproc=nproc, out=tmp_path / "run") == 2
    assert "eval_loss" not in kept(tmp_path / "run")[2]["metrics"]
    check_resumed(path, *settings, nproc=nproc, out=tmp_path / "run", whole=tmp_path / "whole")
    losses = {row["step"]: row["eval_loss"] for row in read_metrics(tmp_path / "run") if "eval_loss" in row}
    assert losses[2] > min(losses[4], losses[6])
    found, wanted = kept(tmp_path / "run"), kept(tmp_path / "whole")
    assert list(found) == list(wanted) == [2, 4, 6]
    assert found[2] == wanted[2]
    # What was saved again is where the run stood.
    again = [*settings, "--checkpoint.resume=" + str(tmp_path / "run" / "checkpoints" / "step_00000002")]
    train(path, *again, nproc=nproc, out=tmp_path / "again")
    assert numbers(tmp_path / "again") == [row for row in numbers(tmp_path / "whole") if row["step"] > 2]


def test_a_stop_where_no_checkpoint_is_due_leaves_none_to_be_judged(tmp_path, triggers):
    path = recipe(tmp_path)
    settings = [
        loss(triggers, 2, in_training=False),
        *("--dataset.validation_rows=10", "--evaluation.every=2"),
        *("--checkpoint.save_every=4", "--checkpoint.keep_last=1"),
        "--checkpoint.keep_best={metric: eval_loss, mode: max}",
    ]
    arm(triggers, 0)
    assert stopped(path, *settings, nproc=1, out=tmp_path / "run") == 2
    train(path, *settings, "--checkpoint.resume=latest", out=tmp_path / "run")
    assert list(kept(tmp_path / "run")) == [4, 6]


def kept(run: Path) -> dict[int, dict[str, Any]]:
    """What each checkpoint of a run knows of the trainer's state, but for its times."""
    found = {}
    for one in complete_checkpoints(run):
        state = one.trainer_state()
        state["metrics"] = {name: value for name, value in state["metrics"].items() if name not in TIMES}
        found[one.step] = state
    return found


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_in_a_save_stops_after_it(tmp_path, triggers, nproc):
    path = recipe(tmp_path)
    settings = ["--checkpoint.save_every=2", DROPOUT]
    train(path, *settings, nproc=nproc, out=tmp_path / "whole")
    arm(triggers, nproc - 1)
    assert stopped(path, *settings, nproc=nproc, out=tmp_path / "run", in_save=triggers) == 2
    check_resumed(path, *settings, nproc=nproc, out=tmp_path / "run", whole=tmp_path / "whole")


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_wait_for_data_is_broken_off(tmp_path, triggers, nproc, workers):
    """No row is lost or taken twice, and no random number."""
    path = recipe(tmp_path)
    settings = [rows(triggers, 13), f"--dataloader.num_workers={workers}", DROPOUT]
    train(path, *settings, nproc=nproc, out=tmp_path / "whole")
    triggers.touch()
    steps = stopped(path, *settings, nproc=nproc, out=tmp_path / "run")
    assert steps < 6
    check_resumed(path, *settings, nproc=nproc, out=tmp_path / "run", whole=tmp_path / "whole")


def test_a_wait_for_the_data_of_an_evaluation_is_broken_off(tmp_path, triggers):
    path = recipe(tmp_path)
    settings = [
        rows(triggers, 5, is_validation=True, validation_rows=8),
        *("--evaluation.every=2", "--training.train_iters=4", DROPOUT),
    ]
    train(path, *settings, nproc=2, out=tmp_path / "whole")
    triggers.touch()
    assert stopped(path, *settings, nproc=2, out=tmp_path / "run") == 2
    check_resumed(path, *settings, nproc=2, out=tmp_path / "run", whole=tmp_path / "whole")


def test_the_evaluation_of_a_pipeline_is_broken_off(tmp_path, triggers):
    """Its ranks agree now and then, so that they can work at the same time."""
    path = recipe(tmp_path)
    settings = [
        loss(triggers, 3, in_training=False),
        *("--dataset.validation_rows=40", "--evaluation.every=2", "--training.train_iters=3"),
        *("--accelerator.pp_size=2", "--training.micro_batch_size=1", DROPOUT),
    ]
    train(path, *settings, nproc=2, out=tmp_path / "whole")
    arm(triggers, 1)
    assert stopped(path, *settings, nproc=2, out=tmp_path / "run") == 2
    check_resumed(path, *settings, nproc=2, out=tmp_path / "run", whole=tmp_path / "whole")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:03d}" * 3}) + "\n" for number in range(24)))
    return path


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("packed_text", ()),
        ("packed_text", ("is_validation: true", "--evaluation.every=2")),
        ("streamed_text", ()),
    ],
    ids=["packed", "evaluation", "streamed"],
)
def test_a_thread_that_reads_holds_up_no_stop(tmp_path, triggers, texts, kind, more):
    """It is left where it waits, and the process ends with its checkpoint and code."""
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace("vocab_size: 96", "vocab_size: 300"))
    given = ", ".join((f"trigger: {triggers}", f"files: {texts}", *more[:1]))
    settings = [f"--dataset={{_target_: tests.e2e.signalling.{kind}, {given}}}", *more[1:], DROPOUT]
    train(path, *settings, out=tmp_path / "whole")
    triggers.touch()
    process = started(path, *settings)
    with gone_afterwards(process):
        wait_for(process, "SIGTERM: stopping")
        began = time.monotonic()
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 75, output
        assert time.monotonic() - began < 15
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    check_resumed(path, *settings, nproc=1, out=tmp_path / "run", whole=tmp_path / "whole")


def test_a_run_that_has_taken_no_step_stops_with_a_checkpoint_as_well(tmp_path, triggers):
    path = recipe(tmp_path)
    # Every row is in the first step; one or another is looked at before.
    settings = [rows(triggers, 3, num_rows=4), "--training.train_iters=3", DROPOUT]
    train(path, *settings, nproc=2, out=tmp_path / "whole")
    triggers.touch()
    assert stopped(path, *settings, nproc=2, out=tmp_path / "run") == 0
    check_resumed(path, *settings, nproc=2, out=tmp_path / "run", whole=tmp_path / "whole")


def test_a_second_signal_ends_at_once(tmp_path, triggers):
    path = recipe(tmp_path)
    arm(triggers, 0)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 ended without a word \(exit code 143\)"):
        stopped(path, loss(triggers, 3, again=0.3), nproc=1, out=tmp_path / "run")
    assert time.monotonic() - began < 30
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def started(path: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run as a terminal starts it: the head of a process group, which Ctrl-C reaches."""
    # A shell in the background has its children ignore SIGINT, and that is inherited.
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); " + (
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start, "-u", "-m", "hp_core", str(path), *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the run ended without {text!r}: {seen}")


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_saves_and_leaves_no_process_behind(tmp_path):
    """It reaches the workers too, which must not end before the run has saved."""
    process = started(recipe(tmp_path), "--training.train_iters=100000", "--dataloader.num_workers=2")
    with gone_afterwards(process):
        wait_for(process, "step 3/")
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 75, output
    assert "SIGINT: stopping at the next step" in output
    assert "--checkpoint.resume=latest goes on" in output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_twice_ends_a_step_that_hangs_and_leaves_no_process_behind(tmp_path, number):
    loss = "--loss_fn={_target_: tests.e2e.signalling.HangingLoss, call: 13}"
    process = started(recipe(tmp_path), loss, "--dataloader.num_workers=2")
    with gone_afterwards(process):
        wait_for(process, "hanging")
        os.killpg(process.pid, number)
        wait_for(process, "a second signal ends the run at once")
        time.sleep(0.3)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 128 + number, output
    assert "ended at once, without a checkpoint" in output


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_second_signal_after_the_save_says_that_it_is_there(tmp_path, in_background):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom hp_core import hookimpl\n\n\n"
        "@hookimpl\ndef on_checkpoint(run, path):\n    print('hanging', flush=True)\n    time.sleep(100)\n"
    )
    settings = ["--training.train_iters=100000", f"--checkpoint.async={in_background}", "-p", "slow.py"]
    process = started(recipe(tmp_path), *settings)
    with gone_afterwards(process):
        wait_for(process, "step 3/")
        os.killpg(process.pid, signal.SIGTERM)
        wait_for(process, "hanging")
        # Two at once are one request.
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM, output
    assert "SIGTERM again: ended at once, the checkpoint of this step is complete" in output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


@contextmanager
def gone_afterwards(process: subprocess.Popen[str]) -> Iterator[None]:
    """What runs inside ends the process's whole group within ten seconds."""
    try:
        yield
        deadline = time.monotonic() + 10
        while not is_gone(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert is_gone(process.pid)
    finally:
        if not is_gone(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
