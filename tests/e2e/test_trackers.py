"""Whole runs whose trackers fail, and what a tracker is told of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train, hp_train_here, manifest, recipe, steps

BREAKING = "{_target_: tests.e2e.parts.BreakingTracker}"
UNCLOSABLE = "{_target_: tests.e2e.parts.UnclosableTracker}"


def kept(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "kept.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_tracker_that_breaks_costs_its_row_and_not_the_run(tmp_path, nproc):
    arguments = [str(recipe(tmp_path)), f"--trackers=[tensorboard, {BREAKING}]"]
    done = hp_train_here(*arguments) if nproc == 1 else hp_train(*arguments, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    rows = read_metrics(run)
    assert steps(rows, "step") == [1, 2, 3, 4, 5, 6]
    assert kept(run)[1:] == [row for row in rows if row["step"] != 2] + ["closed"]
    name = "trackers[1] (tests.e2e.parts.BreakingTracker)"
    told = f"{name}: the row of step 2 can't be logged: RuntimeError: the log broke; training goes on"
    assert done.stdout.count(told) == 1
    assert done.stdout.splitlines()[-1] == f"{name}: 1 of 6 rows are lost; metrics.jsonl has them"
    assert manifest(run)["trackers"] == {
        "trackers[1]": {"rows": 6, "logged": 5, "error": "RuntimeError: the log broke"}
    }
    assert "the log broke" not in done.stderr


def test_nothing_is_said_of_trackers_that_work(tmp_path):
    done = hp_train_here(str(recipe(tmp_path)), "--trackers=[tensorboard]")
    assert "trackers[0]" not in done.stdout
    assert "trackers" not in manifest(tmp_path / "run")


@pytest.mark.parametrize("cause", [None, "the loss broke"])
def test_a_tracker_that_can_t_be_closed_hides_no_cause_and_is_none(tmp_path, cause):
    loss = ["--loss_fn={_target_: tests.e2e.parts.RaisingLoss, rank: 0}"] if cause else []
    done = hp_train_here(str(recipe(tmp_path)), f"--trackers=[{UNCLOSABLE}]", *loss)
    assert done.returncode == (1 if cause else 0)
    assert "UnclosableTracker) can't be closed: OSError: no room for the log" in done.stdout
    assert "no room" not in done.stderr
    assert cause is None or done.stderr.strip().splitlines()[-1] == f"RuntimeError: {cause}"
    assert manifest(tmp_path / "run")["trackers"]["trackers[0]"]["error"] == "OSError: no room for the log"


def test_a_tracker_knows_that_the_run_has_failed(tmp_path):
    loss = "--loss_fn={_target_: tests.e2e.parts.RaisingLoss, rank: 0}"
    assert hp_train_here(str(recipe(tmp_path)), f"--trackers=[{BREAKING}]", loss).returncode == 1
    assert kept(tmp_path / "run")[-2:] == ["failed", "closed"]


def test_trackers_that_are_built_are_closed_when_another_can_t_be(tmp_path):
    trackers = f"--trackers=[{BREAKING}, {{_target_: tests.e2e.parts.broken_tracker}}]"
    done = hp_train_here(str(recipe(tmp_path)), trackers)
    assert done.returncode == 2
    assert "trackers[1]._target_: this tracker is not installed" in done.stderr
    assert kept(tmp_path / "run")[1:] == ["failed", "closed"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tracker_gets_the_resolved_recipe_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_LR", "0.012345")
    path = recipe(tmp_path)
    section = "optimizer:\n  name: adamw\n  lr: ${env:MY_LR}"
    path.write_text(path.read_text().replace("optimizer: {name: adamw, lr: 1e-2}", section))
    assert hp_train_here(str(path), f"--trackers=[{BREAKING}]").returncode == 0
    given = kept(tmp_path / "run")[0]["recipe"]
    assert given["optimizer"] == {"name": "adamw", "lr": "${env:MY_LR}"}
    assert given["training"]["train_iters"] == 6
    assert given["training"]["max_grad_norm"] == 1.0
    assert given["output_dir"] == str(tmp_path / "run")
    assert "0.012345" not in json.dumps(given)
    assert read_metrics(tmp_path / "run")[0]["lr"] == 0.012345
