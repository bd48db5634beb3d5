"""MLflow's own database holds the rows, the recipe and how the run ended."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import ArgumentError
from hp_core.observe.trackers import RunNames
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


def tracker(run_dir: Path, uri: str, **settings: Any) -> MlflowTracker:
    """A tracker of a run that goes on, if it can."""
    names = RunNames(run_dir, continues=True)
    found = MlflowTracker(
        "e", uri, **{"run_dir": run_dir, "first_step": 1, "recipe": RECIPE, "run_names": names, **settings}
    )
    names.write()
    return found


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
    one = tracker(tmp_path, uri, tags={"team": "a"})
    one.log({"step": 2, "loss": 2.5, "tokens": 64, "skipped": None})
    one.log({"step": 2, "eval_loss": 1.5})
    one.log({"step": 4, "loss": math.nan, "tokens": 0, "skipped": "no tokens", "finite": False})
    one.close()
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
    tracker(tmp_path, uri, recipe=recipe).close()
    (run,) = runs(uri)
    assert run.data.params == {f"model.key{index}": str(index) for index in range(250)}


def test_a_run_that_fails_is_marked(tmp_path, uri):
    one = tracker(tmp_path, uri, run_name="mine")
    one.fail()
    one.close()
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


def test_a_run_that_was_deleted_or_is_elsewhere_is_another_when_it_goes_on(tmp_path, uri, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for _ in range(2):
        tracker(tmp_path, None).close()
        (run,) = runs(uri)
        MlflowClient(tracking_uri=uri).delete_run(run.info.run_id)
    other = f"sqlite:///{tmp_path}/other.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    tracker(tmp_path, None).close()
    assert len(runs(other)) == 1


def test_two_of_them_go_on_each_in_its_own_run(tmp_path, uri):
    path, one = str(recipe(tmp_path)), f"name: mlflow, experiment_name: e, tracking_uri: '{uri}'"
    trackers = f"--trackers=[{{{one}}}, {{{one}, run_name: second}}, {{{one.replace('name: e', 'name: other')}}}]"
    assert hp_train_here(path, trackers, "--training.stop_after=3").returncode == 0
    done = hp_train_here(path, trackers, "--checkpoint.resume=latest")
    assert done.returncode == 0, done.stderr
    found = {run.info.run_name: run for run in runs(uri)}
    assert found.keys() == {"run", "second"}
    for run in (*found.values(), *runs(uri, "other")):
        assert [step for step, _ in history(uri, run, "loss")] == [1, 2, 3, 4, 5, 6]


def test_the_same_one_twice_is_refused_before_the_first_step(tmp_path, uri):
    one = f"{{name: mlflow, experiment_name: e, tracking_uri: '{uri}'}}"
    done = hp_train_here(str(recipe(tmp_path)), f"--trackers=[{one}, {one}]")
    assert done.returncode == 2
    wanted = f"trackers[1]: another tracker of the run is the same: mlflow, experiment e, tracking_uri {uri}"
    assert wanted in done.stderr
    assert "remove one, or write another run_name" in done.stderr
    assert [run.info.status for run in runs(uri)] == ["FAILED"]


def test_names_that_mlflow_refuses_and_values_that_are_too_long(tmp_path, uri):
    given = {"a@b": 1, "a_b": 2, "x//y": 3, "../z": 4, "k" * 300: 5, "long": "v" * 7000}
    for _ in range(2):
        one = tracker(tmp_path, uri, recipe=given)
        one.log({"step": 1, "acc@1": 0.5, "acc_1": 0.25})
        one.close()
    (run,) = runs(uri)
    wanted = {"a_b": "1", "a_b 2": "2", "x__y": "3", "___z": "4", "k" * 250: "5", "long": "v" * 6000}
    assert run.data.params == wanted
    assert run.data.metrics == {"acc_1": 0.5, "acc_1 2": 0.25}
    assert not any(name.startswith("from step") for name in run.data.tags)


def test_a_start_that_fails_leaves_no_run_that_seems_to_go_on(tmp_path, uri):
    with pytest.raises(ArgumentError, match=r"MLflow doesn't take the recipe or the tags: .*team@x"):
        tracker(tmp_path, uri, tags={"team@x": "a"})
    (run,) = runs(uri)
    assert run.info.status == "FAILED"
    assert not (tmp_path / "trackers.json").exists()


def test_an_experiment_that_was_deleted_is_told(tmp_path, uri):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    client.delete_experiment(client.create_experiment("e"))
    with pytest.raises(ArgumentError, match="experiment_name: the experiment 'e' was deleted; restore it"):
        tracker(tmp_path, uri)


def test_what_mlflow_refuses_is_told_before_the_first_step(tmp_path, uri):
    trackers = "--trackers=[{name: mlflow, experiment_name: e, tracking_uri: 'gopher://nowhere'}]"
    done = hp_train_here(str(recipe(tmp_path)), trackers)
    assert done.returncode == 2
    assert "trackers[0]: MLflow can't start the run: " in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_mlflow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ArgumentError, match=r"mlflow is not installed; pip install 'hyperparallel\[mlflow\]'"):
        tracker(tmp_path, "sqlite:///runs.db")
