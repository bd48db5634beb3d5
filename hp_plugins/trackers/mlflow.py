"""MLflow, on a tracking server or a database file."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from hp_core.config.render import scalar_text
from hp_core.entry_points import describe
from hp_core.errors import ArgumentError
from hp_core.observe.trackers import RunNames

_V = TypeVar("_V")
# What a tracking server takes in one request.
_MOST_PARAMS = 100
# Of a param's value, and of a name.
_MOST_CHARACTERS, _LONGEST_NAME = 6000, 250
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowTracker:
    """Logs each row's numbers to an MLflow run, whose params are the recipe. A run that goes on is the same MLflow run.

    MLflow never changes a param: a run that goes on with others keeps them in tags, `from step 101/optimizer.lr`.
    """

    def __init__(
        self,
        experiment_name: Annotated[
            str, Field(min_length=1, description="The experiment; it is made if it isn't there.")
        ],
        tracking_uri: Annotated[
            str | None,
            Field(
                description="A tracking server (`http://host:5000`) or a database (`sqlite:///runs.db`); null is what "
                "the variable MLFLOW_TRACKING_URI says, or MLflow's own default."
            ),
        ] = None,
        run_name: Annotated[str | None, Field(description="The run's name; null is the run directory's.")] = None,
        tags: Annotated[dict[str, str] | None, Field(description="Tags of the run.")] = None,
        *,
        run_dir: Path,
        first_step: int,
        recipe: Mapping[str, Any],
        run_names: RunNames,
    ) -> None:
        try:
            import mlflow
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise ArgumentError("name", "mlflow is not installed", "pip install 'hyperparallel[mlflow]'") from error
        self._mlflow = mlflow
        self._status = "FINISHED"
        named = run_names.claim("mlflow", experiment=experiment_name, tracking_uri=tracking_uri, run_name=run_name)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
            self._run_id = self._earlier(named.earlier) or self._new(
                experiment_name, run_name or run_dir.resolve().name
            )
        except MlflowException as error:
            raise ArgumentError("", f"MLflow can't start the run: {describe(error)}", "see tracking_uri") from error
        try:
            self._log_params(_unique(_flat(recipe)), first_step)
            for name, value in (tags or {}).items():
                self._client.set_tag(self._run_id, name, value)
        except MlflowException as error:
            with suppress(MlflowException):
                self._client.set_terminated(self._run_id, "FAILED")
            raise ArgumentError("", f"MLflow doesn't take the recipe or the tags: {describe(error)}") from error
        named.kept = self._run_id

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log the row's numbers at its step; MLflow has no texts over time."""
        now = int(time.time() * 1000)
        step = metrics["step"]
        numbers = _unique((name, value) for name, value in metrics.items() if name != "step" and _is_number(value))
        entities = self._mlflow.entities
        self._client.log_batch(
            self._run_id, metrics=[entities.Metric(name, float(value), now, step) for name, value in numbers.items()]
        )

    def fail(self) -> None:
        """Have MLflow show the run as failed."""
        self._status = "FAILED"

    def close(self) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self._run_id, self._status)

    def _earlier(self, run_id: str | None) -> str | None:
        """Take up a run of before; None if it isn't on this server, or was deleted."""
        if run_id is None:
            return None
        try:
            found = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if found.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _new(self, experiment_name: str, run_name: str) -> str:
        experiment = self._client.get_experiment_by_name(experiment_name)
        if experiment and experiment.lifecycle_stage != "active":
            message = f"the experiment {experiment_name!r} was deleted"
            raise ArgumentError(
                "experiment_name", message, "restore it ('mlflow experiments restore'), or name another"
            )
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(experiment_name)
        run_id: str = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        return run_id

    def _log_params(self, params: Mapping[str, str], first_step: int) -> None:
        known = self._client.get_run(self._run_id).data.params
        entities = self._mlflow.entities
        params = {name: value[:_MOST_CHARACTERS] for name, value in params.items()}
        new = [entities.Param(name, value) for name, value in params.items() if name not in known]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + _MOST_PARAMS])
        for name, value in params.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, f"from step {first_step}/{name}"[:_LONGEST_NAME], value)


def _unique(pairs: Iterable[tuple[str, _V]]) -> dict[str, _V]:
    """Give everything a name that MLflow takes, and no two the same."""
    found: dict[str, _V] = {}
    for name, value in pairs:
        allowed = _NOT_IN_NAMES.sub("_", name)
        # MLflow keeps names as paths in places.
        if posixpath.normpath(allowed) != allowed or allowed.startswith((".", "/")):
            allowed = allowed.replace("/", "_").replace(".", "_")
        allowed = allowed[:_LONGEST_NAME]
        own, number = allowed, 2
        while own in found:
            own, number = f"{allowed[: _LONGEST_NAME - 5]} {number}", number + 1
        found[own] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every scalar of the recipe as text, under its path as MLflow allows it: `plan_overrides.0.match`."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _flat(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Sequence) and value and not isinstance(value, str):
        for index, one in enumerate(value):
            yield from _flat(one, f"{path}.{index}")
    elif isinstance(value, (str, Mapping, Sequence)):
        yield path, value if isinstance(value, str) else "{}" if isinstance(value, Mapping) else "[]"
    else:
        yield path, scalar_text(value)
