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
        assert kept[-2:] == ["step_00000003", "step_00000004"], (at, kept)
        assert all(re.fullmatch(r"step_\d+", one) for one in kept), (at, kept)


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

    def __init__(self, checkpoints: Path, seed: int) -> None:
        self.checkpoints = checkpoints
        self.random = random.Random(seed)

    def next(self) -> tuple[str, Callable[[], bool], float]:
        """A name, what has to happen, and the seconds to wait from there."""
        name = self.random.choice(["at any time", "in a save", "after a save", "when an old one goes"])
        before, start, wait = self._complete(), time.monotonic(), self.random.uniform(0.05, 1.0)
        seen = set(before)

        def at_any_time() -> bool:
            return time.monotonic() - start > wait

        def in_a_save() -> bool:
            return any(not one.startswith("step_") or "." in one for one in self._all())

        def after_a_save() -> bool:
            return not self._complete() <= before

        def when_an_old_one_goes() -> bool:
            now = self._complete()
            seen.update(now)
            return bool(seen - now)

        named = {
            "at any time": at_any_time,
            "in a save": in_a_save,
            "after a save": after_a_save,
            "when an old one goes": when_an_old_one_goes,
        }
        delay = 0.0 if name == "at any time" else self.random.uniform(0.0, 0.02)
        return name, named[name], delay

    def _all(self) -> set[str]:
        try:
            return {one.name for one in self.checkpoints.iterdir()}
        except FileNotFoundError:
            return set()

    def _complete(self) -> set[str]:
        return {one for one in self._all() if one.startswith("step_") and "." not in one}


def at_random(tmp_path: Path, number: int, save: str, nproc: int = 1, seed: int = SEED) -> None:
    """Kill one run again and again, and compare it with one that was let be."""
    path = recipe(tmp_path)
    common = [*SETTINGS, save, f"--training.train_iters={12 * number + 20}"]
    finished(path, [*common, f"--output_dir={tmp_path / 'unbroken'}"], tmp_path / "unbroken.log")
    out = tmp_path / "run"
    overrides = [*common, f"--output_dir={out}"]
    moments, told = Moments(out / CHECKPOINTS, seed), 0
    for count in range(number):
        name, moment, delay = moments.next()
        with Job(path, overrides, tmp_path / f"{count}.log", nproc=nproc) as job:
            was_running = job.kill_when(lambda job=job, moment=moment: "run directory" in job.text and moment(), delay)
        print(f"run {count}: killed {name}, {delay:.4f} s later, seed {seed}: told of step {announced(job.text)}")
        assert was_running, job.text
        assert resumed(job.text) >= told, (count, told, job.text)
        told = max(told, announced(job.text))
    text = finished(path, overrides, tmp_path / "last.log", nproc)
    assert resumed(text) >= told
    assert logged(out)[0] == list(range(1, 12 * number + 21))
    if nproc == 1:
        assert logged(out) == logged(tmp_path / "unbroken")


@pytest.mark.parametrize("save", [SYNC, ASYNC])
def test_killed_at_some_moments(tmp_path: Path, save: str) -> None:
    at_random(tmp_path, 4, save)


@pytest.mark.slow
@pytest.mark.parametrize(("save", "nproc"), [(SYNC, 1), (ASYNC, 1), (ASYNC, 2)])
def test_killed_at_thirty_moments(tmp_path: Path, save: str, nproc: int) -> None:
    at_random(tmp_path, 30, save, nproc)
