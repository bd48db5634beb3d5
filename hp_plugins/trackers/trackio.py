"""Trackio, in a local database or a Space of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hp_core.entry_points import describe
from hp_core.errors import ArgumentError
from hp_core.observe.trackers import RunNames


class TrackioTracker:
    """Logs each row to a Trackio run, whose config is the recipe. A run that goes on is the same Trackio run."""

    def __init__(
        self,
        project: Annotated[str, Field(min_length=1, description="The Trackio project.")],
        run_name: Annotated[str | None, Field(description="The run's name; null is the run directory's.")] = None,
        group: Annotated[str | None, Field(description="The group that Trackio shows the run in.")] = None,
        space_id: Annotated[
            str | None, Field(description="The Space to log to, `user/space`; null is a database on this machine.")
        ] = None,
        private: Annotated[bool | None, Field(description="Whether a Space that is made is private.")] = None,
        *,
        run_dir: Path,
        recipe: Mapping[str, Any],
        run_names: RunNames,
    ) -> None:
        try:
            import trackio
        except ImportError as error:
            raise ArgumentError("name", "trackio is not installed", "pip install 'hyperparallel[trackio]'") from error
        name = run_name or run_dir.resolve().name
        named = run_names.claim("trackio", space_id=space_id, project=project, run_name=name)
        start = partial(
            trackio.init,
            project,
            name=name,
            group=group,
            space_id=space_id,
            private=private,
            config=dict(recipe),
            embed=False,
        )
        try:
            self._run = self._found(start, named.earlier)
        except ArgumentError:
            raise
        except Exception as error:  # trackio has no class of its own for what it raises
            raise ArgumentError("", f"Trackio can't start the run: {describe(error)}") from error
        named.kept = self._run.id

    @staticmethod
    def _found(start: Callable[..., Any], earlier: str | None) -> Any:
        """Take up the run of before; one that never had a row, or was deleted, is started again."""
        if earlier is None:
            return start(resume="never")
        try:
            run = start(resume="must")
        except ValueError:
            return start(resume="never")
        if run.id != earlier:
            # Trackio finds runs by name, and takes the newest.
            message = f"a newer run of the project {run.project!r} has the name {run.name!r}"
            raise ArgumentError("run_name", message, "write another run_name")
        return run

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log the row at its step."""
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=metrics["step"])

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()
