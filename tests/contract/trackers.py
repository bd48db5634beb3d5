"""Rows for the arguments of trackers: what each library is given, or keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest


def tensorboard(bench: Any) -> bool:
    return (bench.run("--trackers=[{name: tensorboard, directory: boards}]").directory / "boards").is_dir()


def wandb(**settings: str) -> Callable[[Any], bool]:
    """Whether W&B's run has the settings."""

    def check(bench: Any) -> bool:
        library = pytest.importorskip("wandb")
        runs: list[Any] = []
        init = library.init

        def start(**arguments: Any) -> Any:
            runs.append(init(**arguments))
            return runs[-1]

        given = ", ".join(f"{name}: {value}" for name, value in {"project": "p", "mode": "offline", **settings}.items())
        with mock.patch.object(library, "init", start):
            outcome = bench.run(f"--trackers=[{{name: wandb, {given}}}]")
        assert outcome.code == 0, outcome.output
        (run,) = runs
        kept = {
            "project": run.settings.project,
            "entity": run.settings.entity,
            "run_name": run.settings.run_name,
            "group": run.settings.run_group,
            "job_type": run.settings.run_job_type,
            "tags": f"[{', '.join(run.settings.run_tags or ())}]",
            "notes": run.settings.run_notes,
            "mode": run.settings.mode,
        }
        return {name: kept[name] for name in settings} == settings

    return check


def mlflow(see: Callable[[Any, str], bool], database: str = "runs.db", **settings: str) -> Callable[[Any], bool]:
    """Whether what MLflow keeps of a run is what `see` looks for, in its client and by the experiment's name."""

    def check(bench: Any) -> bool:
        library = pytest.importorskip("mlflow")
        uri = f"sqlite:///{bench.tmp_path}/{database}"
        given = {"experiment_name": "e", "tracking_uri": f"'{uri}'", **settings}
        text = ", ".join(f"{name}: {value}" for name, value in given.items())
        outcome = bench.run(f"--trackers=[{{name: mlflow, {text}}}]")
        assert outcome.code == 0, outcome.output
        return see(library.MlflowClient(tracking_uri=uri), given["experiment_name"])

    return check


def newest(client: Any, experiment: str) -> Any:
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=1)[0]


def trackio(**settings: str) -> Callable[[Any], bool]:
    """Whether Trackio is given the settings; a Space would have to be on the hub."""

    def check(bench: Any) -> bool:
        library = pytest.importorskip("trackio")
        given = ", ".join(f"{name}: {value}" for name, value in {"project": "p", **settings}.items())
        with mock.patch.object(library, "init") as init:
            init.return_value.id = "some"
            assert bench.run(f"--trackers=[{{name: trackio, {given}}}]").code == 0
        arguments = {"project": init.call_args.args[0], "run_name": init.call_args.kwargs["name"]}
        arguments |= {name: str(value).lower() for name, value in init.call_args.kwargs.items()}
        return {name: arguments[name] for name in settings} == settings

    return check


TRACKER_KEYS: dict[str, Callable[[Any], Any]] = {
    "trackers": tensorboard,
    "hp.trackers.tensorboard.directory": tensorboard,
    **{
        f"hp.trackers.wandb.{name}": wandb(**{name: value})
        for name, value in {
            "project": "mine",
            "entity": "team",
            "run_name": "one",
            "group": "many",
            "job_type": "sft",
            "tags": "[a, b]",
            "notes": "text",
            "mode": "disabled",
        }.items()
    },
    "hp.trackers.mlflow.experiment_name": mlflow(
        lambda client, name: client.get_experiment_by_name(name) is not None, experiment_name="other"
    ),
    "hp.trackers.mlflow.tracking_uri": mlflow(
        lambda client, name: "loss" in newest(client, name).data.metrics, database="other.db"
    ),
    "hp.trackers.mlflow.run_name": mlflow(
        lambda client, name: newest(client, name).info.run_name == "mine", run_name="mine"
    ),
    "hp.trackers.mlflow.tags": mlflow(
        lambda client, name: newest(client, name).data.tags["team"] == "a", tags="{team: a}"
    ),
    **{
        f"hp.trackers.trackio.{name}": trackio(**{name: value})
        for name, value in {
            "project": "mine",
            "run_name": "one",
            "group": "many",
            "space_id": "me/space",
            "private": "true",
        }.items()
    },
}
