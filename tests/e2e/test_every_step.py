"""Stopped at any step, a run goes on as if it had never been: the same rows, losses, weights, moments and streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from hp_core.testing.ranks import run_ranks
from tests.e2e.recorded import Taken, sessions
from tests.e2e.runs import WITH_COMPONENTS, recipe

HERE = (*WITH_COMPONENTS, "tests.e2e.recorded")
# Twenty rows in batches of six are four steps, of which the last is short; three epochs of them.
NUM_STEPS = 12
SETTINGS = (
    "--model.config.attention_dropout=0.2",
    "--lr_scheduler={name: cosine, warmup_steps: 3}",
    "--dataset.num_rows=20",
    "--training={train_epochs: 3, global_batch_size: 6, seed: 3}",
)
RESUME = "--checkpoint.resume=latest"


def trainer(stop_at: int = 0, rank: int = 0) -> str:
    # Half of the stops come after a step, half while the rows of the next one are read.
    reading = str(stop_at % 2 == 1).lower()
    arguments = f"stop_at: {stop_at}, while_reading: {reading}, rank: {rank}"
    return f"--trainer={{_target_: tests.e2e.recorded.RecordedTrainer, {arguments}}}"


def broken_runs(folder: Path, stops: Iterable[int], common: Sequence[str], rank: int) -> list[list[list[str]]]:
    """For each stop three sessions: up to it, from there to the step after it, and from there to the end."""
    runs = []
    for stop in stops:
        out = f"--output_dir={folder / str(stop)}"
        once = [*common, out, trainer(stop, rank)]
        again = [*common, out, RESUME]
        runs.append([once, [*again, trainer(stop + 1, rank)], [*again, trainer()]])
    return runs


def require_as_unbroken(tmp_path: Path, nproc: int, stops: Sequence[int], *more: str) -> None:
    path = recipe(tmp_path)
    common = [*SETTINGS, *more]
    unbroken = [*common, f"--output_dir={tmp_path / 'unbroken'}", trainer()]
    runs = broken_runs(tmp_path, stops, common, rank=nproc - 1)
    each = [unbroken, *(session for run in runs for session in run)]
    by_rank = run_ranks(sessions, nproc, str(path), each, timeout=900, preload=HERE)
    for first, *rest in by_rank:
        assert [one.step for one in first] == list(range(1, NUM_STEPS + 1))
        parts = iter(rest)
        for stop in stops:
            found = [next(parts) for _ in range(3)]
            assert [len(part) for part in found] == [stop, 1, NUM_STEPS - stop - 1], stop
            assert [one for part in found for one in part] == first, stop
    require_every_row_once_an_epoch(by_rank)


def require_every_row_once_an_epoch(by_rank: list[list[list[Taken]]]) -> None:
    """Of the unbroken run, whose rows the others have."""
    of_steps = [[one for rank in by_rank for one in rank[0][step].sample_ids] for step in range(NUM_STEPS)]
    for epoch in range(3):
        rows = [row for ids in of_steps[4 * epoch : 4 * epoch + 4] for row in ids]
        assert sorted(rows) == list(range(20))
    assert of_steps[0:4] != of_steps[4:8] != of_steps[8:12]


ALL = range(1, NUM_STEPS - 1)
# The first step, and the steps around the edges of epochs.
CORE = (1, 3, 4, 7, 8)


@pytest.mark.parametrize("nproc", [1, 2])
def test_stopped_at_any_step_and_at_the_next_one_again(tmp_path: Path, nproc: int) -> None:
    require_as_unbroken(tmp_path, nproc, CORE)


@pytest.mark.parametrize("nproc", [1, 2])
def test_stopped_at_the_edge_of_an_epoch_with_workers(tmp_path: Path, nproc: int) -> None:
    require_as_unbroken(tmp_path, nproc, (4,), "--dataloader.num_workers=2")


@pytest.mark.slow
@pytest.mark.parametrize("save", ["--checkpoint.async=false", "--checkpoint.async=true"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("nproc", [1, 2])
def test_every_step(tmp_path: Path, nproc: int, workers: int, save: str) -> None:
    require_as_unbroken(tmp_path, nproc, ALL, f"--dataloader.num_workers={workers}", save)


NUM_RANKS = (2, 1, 4)
# Without dropout, whose streams belong to ranks; batches that four ranks can share.
SHARED = (*SETTINGS[1:3], "--training={train_epochs: 3, global_batch_size: 4, seed: 3}")


def rows_of(by_rank: list[list[list[Taken]]], session: int) -> list[list[int]]:
    """The rows of each step over all ranks."""
    steps = zip(*(rank[session] for rank in by_rank), strict=True)
    return [sorted(row for one in ranks for row in one.sample_ids) for ranks in steps]


@pytest.mark.parametrize(
    "stops",
    [(4, 9), *(pytest.param((stop, stop + 1), marks=pytest.mark.slow) for stop in range(1, 14))],
    ids=str,
)
def test_two_ranks_then_one_then_four(tmp_path: Path, stops: tuple[int, int]) -> None:
    path = recipe(tmp_path)
    (unbroken,) = run_ranks(
        sessions, 1, str(path), [[*SHARED, "--output_dir=" + str(tmp_path / "a"), trainer()]], preload=HERE
    )
    wanted = unbroken[0]
    found: list[Taken] = []
    rows: list[list[int]] = []
    for nproc, stop in zip(NUM_RANKS, (*stops, 0), strict=True):
        overrides = [*SHARED, RESUME, f"--output_dir={tmp_path / 'b'}", trainer(stop)]
        by_rank = run_ranks(sessions, nproc, str(path), [overrides], preload=HERE)
        found += by_rank[0][0]
        rows += rows_of(by_rank, 0)
    assert rows == [sorted(one.sample_ids) for one in wanted]
    assert [one.loss for one in found] == pytest.approx([one.loss for one in wanted], abs=1e-5)
    for name in ("step", "lr", "tokens"):
        assert [getattr(one, name) for one in found] == [getattr(one, name) for one in wanted]
