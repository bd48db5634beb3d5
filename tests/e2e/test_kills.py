"""A run that is killed goes on from the last checkpoint it told of, or a newer one, and ends as if it had lived."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_core.checkpoint.layout import CHECKPOINTS
from hp_core.observe.trackers import read_metrics
from tests.e2e.killed import Job, announced, changes, resumed
from tests.e2e.runs import recipe, steps

SETTINGS = (
    "--model.config.attention_dropout=0.2",
    "--lr_scheduler={name: cosine, warmup_steps: 3}",
    "--checkpoint.save_every=1",
    "--checkpoint.keep_last=2",
    "--checkpoint.resume=latest",
)
SYNC, ASYNC = "--checkpoint.async=false", "--checkpoint.async=true"
LOGGED = ("step", "loss", "grad_norm", "lr", "tokens", "total_tokens", "samples", "epoch")
SEED = 7


def finished(path: Path, overrides: list[str], log: Path, nproc: int = 1) -> str:
    """Run to the end and return what was printed."""
    with Job(path, overrides, log, nproc=nproc) as job:
        assert job.wait() == [0] * nproc, job.text
    return job.text


def logged(run: Path) -> list[list[object]]:
    rows = read_metrics(run)
    return [steps(rows, name) for name in LOGGED]


# Killed before a certain change of a file.


def at_changes(tmp_path: Path, save: str, chosen: Callable[[int], list[int]], nproc: int = 1) -> None:
    """Kill a run of four saves before each of the chosen changes of files under its checkpoints."""
    path = recipe(tmp_path)
    common = [*SETTINGS, save, "--training.train_iters=4"]
    out = tmp_path / "unbroken"
    number = changes(finished(path, [*common, f"--output_dir={out}"], tmp_path / "unbroken.log", nproc))
    # Four saves, of a folder, some files, and a name that is changed last; two older ones that go.
    assert number > 4 * 5
    wanted = logged(out)
    for at in chosen(number):
        out, log = tmp_path / f"run{at}", tmp_path / f"{at}.log"
        overrides = [*common, f"--output_dir={out}"]
        with Job(path, overrides, log, nproc=nproc, kill_at=at) as job:
            codes = job.wait()
        # How many files are opened differs a little when others wait for them in the background.
        assert codes[0] == -9 or (save == ASYNC and at > number - 8), (at, codes, job.text)
        told = announced(job.text)
        text = finished(path, overrides, tmp_path / f"{at}.again.log", nproc)
        assert resumed(text) >= told, (at, told, text)
        assert logged(out) == wanted, at
        kept = sorted(one.name for one in (out / CHECKPOINTS).iterdir())
        assert kept == ["step_00000003", "step_00000004"], (at, kept)


def some(number: int) -> list[int]:
    """A handful, the first and the last among them; which ones differs with their number."""
    return sorted({1, number, *random.Random(number).sample(range(2, number), 5)})


@pytest.mark.parametrize("save", [SYNC, ASYNC])
def test_killed_before_some_change_of_a_file(tmp_path: Path, save: str) -> None:
    at_changes(tmp_path, save, some)


@pytest.mark.slow
@pytest.mark.parametrize(("save", "nproc"), [(SYNC, 1), (ASYNC, 1), (SYNC, 2)])
def test_killed_before_any_change_of_a_file(tmp_path: Path, save: str, nproc: int) -> None:
    at_changes(tmp_path, save, lambda number: list(range(1, number + 1)), nproc)


# Killed at any moment.


class Moments:
    """Random moments of a run, some of them in the middle of a save or of what it does with older ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def next(self, job: Job, checkpoints: Path) -> tuple[str, Callable[[], bool], float]:
        """A name, what has to happen, and the seconds to wait from there."""
        names = ("at any time", "in a save", "after a save", "when an old one goes")
        name, wait = self.random.choice(names), self.random.uniform(0.02, 0.6)
        delay = 0.0 if name == "at any time" else self.random.uniform(0.0, 0.02)
        begun: list[float] = []
        seen: set[str] = set()

        def is_there() -> bool:
            if not begun:
                if "run directory" in job.text:
                    begun.append(time.monotonic())
                    seen.update(_names(checkpoints))
                return False
            now, before = _names(checkpoints), set(seen)
            seen.update(now)
            if time.monotonic() - begun[0] > (wait if name == "at any time" else 1.0):
                return True
            return {
                "at any time": False,
                "in a save": any(not _is_complete(one) for one in now),
                "after a save": any(_is_complete(one) for one in now - before),
                "when an old one goes": any(_is_complete(one) for one in before - now),
            }[name]

        return name, is_there, delay


def _names(checkpoints: Path) -> set[str]:
    return {one.name for one in checkpoints.iterdir()} if checkpoints.is_dir() else set()


def _is_complete(name: str) -> bool:
    return re.fullmatch(r"step_\d+", name) is not None


def at_random(tmp_path: Path, number: int, save: str, nproc: int = 1, seed: int = SEED) -> None:
    """Kill a run again and again, and compare it with one that was let be; a new one follows when it has ended."""
    path = recipe(tmp_path)
    common = [*SETTINGS, save, f"--training.train_iters={5 * number + 30}"]
    finished(path, [*common, f"--output_dir={tmp_path / 'unbroken'}"], tmp_path / "unbroken.log")
    wanted = logged(tmp_path / "unbroken")
    moments, killed, runs, starts = Moments(seed), 0, 0, 0
    while killed < number:
        runs += 1
        out, told, is_over = tmp_path / f"run{runs}", 0, False
        while not is_over:
            starts += 1
            with Job(path, [*common, f"--output_dir={out}"], tmp_path / f"{starts}.log", nproc=nproc) as job:
                if killed < number:
                    name, moment, delay = moments.next(job, out / CHECKPOINTS)
                    is_over = not job.kill_when(moment, delay)
                    print(f"{killed}: {name}, {delay:.4f} s later, seed {seed}: step {announced(job.text)} was told of")
                    killed += not is_over
                else:
                    is_over = True
                if is_over:
                    assert job.wait() == [0] * nproc, job.text
            if "run directory" in job.text:
                assert resumed(job.text) >= told, (killed, told, job.text)
            told = max(told, announced(job.text))
        found = logged(out)
        assert found[0] == wanted[0]
        if nproc == 1:
            assert found == wanted


@pytest.mark.parametrize("save", [SYNC, ASYNC])
def test_killed_at_some_moments(tmp_path: Path, save: str) -> None:
    at_random(tmp_path, 4, save)


@pytest.mark.slow
@pytest.mark.parametrize(("save", "nproc"), [(SYNC, 1), (ASYNC, 1), (ASYNC, 2)])
def test_killed_at_thirty_moments(tmp_path: Path, save: str, nproc: int) -> None:
    at_random(tmp_path, 30, save, nproc)
