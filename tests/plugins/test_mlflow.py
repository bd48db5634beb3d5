"""MLflow's own database holds the rows, the recipe and how the run ended."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import ArgumentError
from hp_core.observe.trackers import forget
from hp_plugins.trackers.mlflow import MlflowTracker
from tests.e2e.runs import hp_train_here, recipe

RECIPE = {
    "training": {"seed": 3, "max_grad_norm": None, "enable_full_determinism": False},
    "plan_overrides": [{"match": ["*.mlp", "*.norm"]}],
    "plugins": [],
    "model": {"name": "causal_lm", "config": {}},
}


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


def runs(uri: str, experiment: str = "e") -> list[Any]:
    """The experiment's runs, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return sorted(found, key=lambda run: run.info.start_time)


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    found = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, name)
    return [(one.step, one.value) for one in found]


def test_every_number_is_kept_at_its_step(tmp_path, uri):
    tracker = MlflowTracker("e", uri, tags={"team": "a"}, run_dir=tmp_path, first_step=1, recipe=RECIPE)
    tracker.log({"step": 2, "loss": 2.5, "tokens": 64, "skipped": None})
    tracker.log({"step": 2, "eval_loss": 1.5})
    tracker.log({"step": 4, "loss": math.nan, "tokens": 0, "skipped": "no tokens", "finite": False})
    tracker.close()
    (run,) = runs(uri)
    loss = history(uri, run, "loss")
    assert loss[0] == (2, 2.5)
    assert loss[1][0] == 4
    assert math.isnan(loss[1][1])
    assert history(uri, run, "eval_loss") == [(2, 1.5)]
    assert history(uri, run, "tokens") == [(2, 64.0), (4, 0.0)]
    assert set(run.data.metrics) == {"loss", "eval_loss", "tokens"}
    assert run.data.params == {
        "training.seed": "3",
        "training.max_grad_norm": "null",
        "training.enable_full_determinism": "false",
        "plan_overrides.0.match.0": "*.mlp",
        "plan_overrides.0.match.1": "*.norm",
        "plugins": "[]",
        "model.name": "causal_lm",
        "model.config": "{}",
    }
    assert run.data.tags["team"] == "a"
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")


def test_more_params_than_a_server_takes_at_once(tmp_path, uri):
    recipe = {"model": {f"key{index}": index for index in range(250)}}
    MlflowTracker("e", uri, run_dir=tmp_path, first_step=1, recipe=recipe).close()
    (run,) = runs(uri)
    assert run.data.params == {f"model.key{index}": str(index) for index in range(250)}


def test_a_run_that_fails_is_marked(tmp_path, uri):
    tracker = MlflowTracker("e", uri, run_name="mine", run_dir=tmp_path, first_step=1, recipe=RECIPE)
    tracker.fail()
    tracker.close()
    (run,) = runs(uri)
    assert (run.info.run_name, run.info.status) == ("mine", "FAILED")


def test_a_run_that_goes_on_is_the_same_run_and_one_that_starts_over_another(tmp_path, uri):
    path = str(recipe(tmp_path))
    trackers = f"--trackers=[{{name: mlflow, experiment_name: e, tracking_uri: '{uri}'}}]"
    assert hp_train_here(path, trackers, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, trackers, "--checkpoint.resume=latest", "--training.log_every=2")
    assert done.returncode == 0, done.stderr
    assert "trackers[0]" not in done.stdout
    (run,) = runs(uri)
    assert [step for step, _ in history(uri, run, "loss")] == [1, 2, 3, 4, 6]
    assert run.data.params["training.log_every"] == "1"
    assert run.data.tags["from step 4/training.log_every"] == "2"
    assert run.data.params["output_dir"] == str(tmp_path / "run")
    assert run.info.status == "FINISHED"
    assert hp_train_here(path, trackers, "--overwrite", "--training.train_iters=1").returncode == 0
    assert len(runs(uri)) == 2


def test_a_run_that_was_deleted_is_another_when_it_goes_on(tmp_path, uri):
    from mlflow import MlflowClient

    for _ in range(2):
        MlflowTracker("e", uri, run_dir=tmp_path, first_step=1, recipe=RECIPE).close()
        (run,) = runs(uri)
        MlflowClient(tracking_uri=uri).delete_run(run.info.run_id)
    other = f"sqlite:///{tmp_path}/other.db"
    MlflowTracker("e", other, run_dir=tmp_path, first_step=1, recipe=RECIPE).close()
    assert len(runs(other)) == 1
    forget(tmp_path)


def test_what_mlflow_refuses_is_told_before_the_first_step(tmp_path, uri):
    trackers = "--trackers=[{name: mlflow, experiment_name: e, tracking_uri: 'gopher://nowhere'}]"
    done = hp_train_here(str(recipe(tmp_path)), trackers)
    assert done.returncode == 2
    assert "trackers[0]: MLflow can't start the run: " in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_mlflow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ArgumentError, match=r"mlflow is not installed; pip install 'hyperparallel\[mlflow\]'"):
        MlflowTracker("e", run_dir=tmp_path, first_step=1, recipe=RECIPE)
