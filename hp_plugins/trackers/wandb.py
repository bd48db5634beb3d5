"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hp_core.entry_points import describe
from hp_core.errors import ArgumentError
from hp_core.observe.trackers import RunNames

# Less than a closing tracker is waited for, so that what W&B says of it is told.
_FINISH_SECONDS = 25.0
_LOGIN = "'wandb login', or write mode: offline"


class WandbTracker:
    """Logs each row to a W&B run, whose config is the recipe; the x axis of every chart is `step`.

    A run that goes on is the same W&B run. Its files are under `wandb/` of the run directory.
    """

    def __init__(
        self,
        project: Annotated[str, Field(min_length=1, description="The W&B project.")],
        entity: Annotated[str | None, Field(description="User or team; null is the account's default.")] = None,
        run_name: Annotated[str | None, Field(description="What W&B shows; null is the run directory's name.")] = None,
        group: Annotated[str | None, Field(description="The group that W&B shows the run in.")] = None,
        job_type: Annotated[str | None, Field(description="The kind of run inside a group.")] = None,
        tags: Annotated[tuple[str, ...], Field(description="Tags of the run.")] = (),
        notes: Annotated[str | None, Field(description="A longer text on the run.")] = None,
        mode: Annotated[
            Literal["online", "offline", "disabled"] | None,
            Field(
                description="`offline` only writes files, which `wandb sync` uploads; `disabled` does nothing; null is "
                "what the variable WANDB_MODE says, or `online`."
            ),
        ] = None,
        *,
        run_dir: Path,
        recipe: Mapping[str, Any],
        run_names: RunNames,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ArgumentError("name", "wandb is not installed", "pip install 'hyperparallel[wandb]'") from error
        named = run_names.claim(
            "wandb", entity=entity, project=project, run_name=run_name, group=group, job_type=job_type
        )
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=run_name or run_dir.resolve().name,
                group=group,
                job_type=job_type,
                tags=tags,
                notes=notes,
                mode=mode,
                dir=run_dir,
                id=named.earlier,
                resume="allow",
                allow_val_change=True,
                config=dict(recipe),
                reinit="create_new",
                settings=wandb.Settings(finish_timeout=_FINISH_SECONDS, finish_timeout_raises=True),
            )
        except Exception as error:  # its settings and the process that writes raise what is no wandb.Error
            raise _refused(error) from error
        # Not W&B's own step, which takes nothing for the steps that a run takes again.
        self._run.define_metric("*", step_metric="step")
        named.kept = self._run.id
        self._exit_code = 0

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log the row's numbers and texts."""
        self._run.log({name: value for name, value in metrics.items() if value is not None})

    def fail(self) -> None:
        """Have W&B show the run as failed."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the W&B run.

        Raises:
            TimeoutError: not everything was uploaded in time; `wandb sync` uploads the rest.
        """
        self._run.finish(exit_code=self._exit_code)


def _refused(error: Exception) -> ArgumentError:
    """Why W&B doesn't start a run, at the argument that it is about."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        setting = str(first["loc"][0]) if first["loc"] else ""
        path = "run_name" if setting == "run_name" else setting.removeprefix("run_")
        return ArgumentError(path, str(first["msg"]).removeprefix("Value error, "))
    message = f"W&B can't start the run: {describe(error)}"
    if "Invalid project name" in str(error):
        return ArgumentError("project", message)
    unreachable = isinstance(error, (TimeoutError, ConnectionError)) or "CommError" in map(
        attrgetter("__name__"), type(error).__mro__
    )
    return ArgumentError("", message, _LOGIN if unreachable or "wandb login" in str(error) else "")
