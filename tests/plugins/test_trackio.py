"""Trackio's own database holds the rows and the recipe."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import ArgumentError
from hp_core.observe.trackers import RunNames
from hp_plugins.trackers.trackio import TrackioTracker
from tests.e2e.runs import hp_train_here, recipe

RECIPE = {"training": {"seed": 3}, "loss_fn": None}


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trackio's reader of its own databases, which are in a folder of the test."""
    # Before the first import, which reads it.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return sqlite_storage.SQLiteStorage


def tracker(run_dir: Path, *settings: str) -> TrackioTracker:
    names = RunNames(run_dir, continues=True)
    found = TrackioTracker("p", *settings, run_dir=run_dir, recipe=RECIPE, run_names=names)
    names.write()
    return found


def rows(storage: Any, name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "timestamp"} for row in storage.get_logs("p", name)]


def test_rows_are_kept_at_their_steps(tmp_path, storage):
    one = tracker(tmp_path, "mine", "g")
    one.log({"step": 2, "loss": 2.5, "tokens": 64, "skipped": None})
    one.log({"step": 2, "eval_loss": 1.5})
    one.log({"step": 4, "loss": math.nan, "skipped": "no tokens"})
    one.close()
    found = rows(storage, "mine")
    assert found[:2] == [{"step": 2, "loss": 2.5, "tokens": 64, "skipped": None}, {"step": 2, "eval_loss": 1.5}]
    assert math.isnan(found[2].pop("loss"))
    assert found[2] == {"step": 4, "skipped": "no tokens"}
    config = storage.get_run_config("p", "mine")
    assert config["training"] == {"seed": 3}
    assert config["_Group"] == "g"


def test_a_run_that_goes_on_is_the_same_run_and_one_that_starts_over_another(tmp_path, storage):
    path = str(recipe(tmp_path))
    trackers = "--trackers=[{name: trackio, project: p}]"
    assert hp_train_here(path, trackers, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, trackers, "--checkpoint.resume=latest", "--training.log_every=2")
    assert done.returncode == 0, done.stderr
    assert "trackers[0]" not in done.stdout
    assert len(storage.get_run_records("p")) == 1
    assert [row["step"] for row in rows(storage, "run")] == [1, 2, 3, 4, 6]
    assert hp_train_here(path, trackers, "--overwrite", "--training.train_iters=1").returncode == 0
    assert len(storage.get_run_records("p")) == 2


def test_two_of_them_go_on_each_in_its_own_run_and_no_two_are_the_same(tmp_path, storage):
    path, one = str(recipe(tmp_path)), "{name: trackio, project: p}"
    trackers = f"--trackers=[{one}, {{name: trackio, project: p, run_name: second}}]"
    assert hp_train_here(path, trackers, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, trackers, "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    assert len(storage.get_run_records("p")) == 2
    for name in ("run", "second"):
        assert [row["step"] for row in rows(storage, name)] == [1, 2, 3, 4, 5, 6]
    done = hp_train_here(path, f"--trackers=[{one}, {one}]", "--overwrite")
    assert done.returncode == 2
    assert "trackers[1]: another tracker of the run is the same: trackio, project p, run_name run" in done.stderr


def test_a_run_whose_name_another_has_taken_does_not_go_on_in_that(tmp_path, storage):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        one = tracker(tmp_path / folder, "mine")
        one.log({"step": 1, "loss": 1.0})
        one.close()
    with pytest.raises(ArgumentError, match="run_name: a newer run of the project 'p' has the name 'mine'"):
        tracker(tmp_path / "one", "mine")


def test_a_run_that_never_had_a_row_is_started_again(tmp_path, storage):
    for _ in range(2):
        one = tracker(tmp_path, "mine")
        one.close()
    one.log({"step": 1, "loss": 1.0})
    one.close()
    assert rows(storage, "mine") == [{"step": 1, "loss": 1.0}]


def test_what_trackio_refuses_is_told_before_the_first_step(tmp_path, storage):
    done = hp_train_here(str(recipe(tmp_path)), "--trackers=[{name: trackio, project: p, space_id: mine}]")
    assert done.returncode == 2
    assert "trackers[0]: Trackio can't start the run: " in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_trackio_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ArgumentError, match=r"trackio is not installed; pip install 'hyperparallel\[trackio\]'"):
        tracker(tmp_path)
