"""Where a run stands, in its data and its schedule: the same however the work is cut, saved and taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.testing.ranks import run_ranks
from tests.e2e.recorded import Taken, sessions
from tests.e2e.runs import recipe
from tests.e2e.test_every_step import HERE, RESUME, rows_of, trainer

DROPOUT = "--model.config.attention_dropout=0.2"
# Twenty rows in batches of six, for three epochs: every fourth step is a short one.
EPOCHS = ("--dataset.num_rows=20", "--training={train_epochs: 3, global_batch_size: 6, seed: 3}")


def taken(path: Path, *each: list[str], nproc: int = 1) -> list[list[list[Taken]]]:
    """The steps of some runs, one after the other, by rank."""
    return run_ranks(sessions, nproc, str(path), list(each), timeout=300, preload=HERE)


def to(folder: Path) -> str:
    return f"--output_dir={folder}"


# What changes between two runs.


@pytest.mark.parametrize("workers", [(2, 3), (0, 2), (3, 0)])
def test_another_number_of_workers_goes_on_bit_for_bit(tmp_path, workers):
    path, common = recipe(tmp_path), [*EPOCHS, DROPOUT]
    first, second = (f"--dataloader.num_workers={number}" for number in workers)
    ((unbroken, before, after),) = taken(
        path,
        [*common, to(tmp_path / "a"), trainer()],
        [*common, to(tmp_path / "b"), first, trainer(6)],
        [*common, to(tmp_path / "b"), second, RESUME, trainer()],
    )
    assert len(before) == 6
    assert [*before, *after] == unbroken


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 6)])
def test_other_micro_batches_go_on_with_the_same_rows(tmp_path, sizes):
    path = recipe(tmp_path)
    first, second = (f"--training.micro_batch_size={size}" for size in sizes)
    ((unbroken, before, after),) = taken(
        path,
        [*EPOCHS, to(tmp_path / "a"), trainer()],
        [*EPOCHS, to(tmp_path / "b"), first, trainer(5)],
        [*EPOCHS, to(tmp_path / "b"), second, RESUME, trainer()],
    )
    found = [*before, *after]
    for name in ("step", "sample_ids", "lr", "tokens"):
        assert [getattr(one, name) for one in found] == [getattr(one, name) for one in unbroken], name
    assert [one.loss for one in found] == pytest.approx([one.loss for one in unbroken], abs=1e-5)


def test_another_batch_size_goes_on_with_the_rows_that_are_left(tmp_path):
    path = recipe(tmp_path)
    training = "--training={{train_epochs: 2, global_batch_size: {}, seed: 3}}"
    rows = "--dataset.num_rows=20"
    ((unbroken, before, after),) = taken(
        path,
        [rows, training.format(6), to(tmp_path / "a"), trainer()],
        [rows, training.format(6), to(tmp_path / "b"), trainer(2)],
        [rows, training.format(4), to(tmp_path / "b"), RESUME, trainer()],
    )
    order = [row for one in unbroken for row in one.sample_ids]
    assert [row for one in (*before, *after) for row in one.sample_ids] == order
    assert [len(one.sample_ids) for one in after] == [4, 4, *[4] * 5]


# Learning rates.

# A warm-up of four steps, two at the peak, and four down to nothing.
WSD = "--lr_scheduler={name: wsd, warmup_steps: 4, decay_steps: 4, min_lr_ratio: 0.0}"
PEAK = 0.01
RATES = [PEAK * one for one in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0)]
TEN = "--training={{train_iters: 10, global_batch_size: 6, micro_batch_size: {}, seed: 3}}"


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_rate_belongs_to_a_step_of_the_optimizer(tmp_path, nproc, micro_batch_size):
    """Not to a micro-batch nor to a rank, and it is never zero in the first step."""
    settings = [WSD, TEN.format(micro_batch_size), to(tmp_path / "run"), trainer()]
    for ((steps),) in taken(recipe(tmp_path), settings, nproc=nproc):
        assert [one.lr for one in steps] == pytest.approx(RATES)


def test_resumed_at_each_step_the_rates_are_the_same(tmp_path):
    common = [WSD, TEN.format(1), to(tmp_path / "run"), "--checkpoint.resume=latest"]
    (found,) = taken(recipe(tmp_path), *([*common, trainer(stop)] for stop in (*range(1, 10), 0)))
    assert [len(one) for one in found] == [1] * 10
    assert [one.lr for steps in found for one in steps] == pytest.approx(RATES)


# Saving changes nothing.


@pytest.mark.parametrize("save", ["--checkpoint.async=false", "--checkpoint.async=true"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_saves_each_step_is_the_run_that_saves_none(tmp_path, nproc, save):
    """No step of the optimizer to make room for its state, no draw from a random stream, no weight that moves."""
    common = [DROPOUT, "--training={train_iters: 4, global_batch_size: 4, seed: 3}"]
    never = [*common, to(tmp_path / "a"), "--checkpoint.save_last=false", trainer()]
    always = [*common, to(tmp_path / "b"), save, "--checkpoint.save_every=1", trainer()]
    for without, with_saves in taken(recipe(tmp_path), never, always, nproc=nproc):
        assert len(without) == 4
        assert with_saves == without


# The last, short step of an epoch.


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_five_rows_in_batches_of_four(tmp_path, nproc, stop):
    """Two steps an epoch, each normalised by its own tokens; what is stopped anywhere leaves no gradient over."""
    rows = ["--dataset.num_rows=5", "--training={train_epochs: 2, global_batch_size: 4, seed: 3}"]
    by_rank = taken(
        recipe(tmp_path),
        [*rows, to(tmp_path / "a"), trainer()],
        [*rows, to(tmp_path / "b"), trainer(stop)],
        [*rows, to(tmp_path / "b"), RESUME, trainer()],
        nproc=nproc,
    )
    steps = rows_of(by_rank, 0)
    assert [len(ids) for ids in steps] == [4, 1, 4, 1]
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == list(range(5))
    for unbroken, before, after in by_rank:
        assert [*before, *after] == unbroken
    for name in "ab":
        assert (tmp_path / name / "checkpoints" / "step_00000004").is_dir()
