"""Where metrics go: the tracker interface, its runs' names, and the JSON-lines file that every run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hp_core.errors import ArgumentError

METRICS_FILE = "metrics.jsonl"
# By tracker, what it calls the run, for the run that goes on.
TRACKERS_FILE = "trackers.json"


class Tracker(Protocol):
    """A sink for metrics; lives on the main rank only.

    It is built on the main thread, where whatever it raises ends the run before its first step. Its methods are called
    on another, one call after the other, and what they raise is told and recorded; the run goes on.
    """

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Take one row. It has a `step`; a value is a number, a text, or None where there is no number to tell.

        It may be called again with a row that it has raised at.
        """
        ...

    def close(self) -> None:
        """Flush and let go of files; called once, also when the run fails."""
        ...


@runtime_checkable
class MarksFailure(Protocol):
    """A tracker that shows which runs have failed."""

    def fail(self) -> None:
        """Know, before `close`, that the run has failed."""
        ...


class RunNames:
    """What trackers call this run, for the run that goes on: `trackers.json` of its directory.

    Nothing is written before all trackers are built, so that a run that can't begin takes nothing from the one before.
    """

    def __init__(self, directory: Path, *, continues: bool) -> None:
        self._path = directory / TRACKERS_FILE
        self._before: dict[str, str] = {}
        if continues and self._path.exists():
            self._before = json.loads(self._path.read_text(encoding="utf-8"))
        self._now: dict[str, RunName] = {}

    def claim(self, library: str, **told: str | None) -> RunName:
        """Take a place for a tracker; `told` is all that its library tells runs by, as in the recipe.

        Raises:
            ArgumentError: another tracker of this run has it.
        """
        tracker = ", ".join([library, *(f"{field} {value}" for field, value in told.items() if value is not None)])
        if tracker in self._now:
            message = f"another tracker of the run is the same: {tracker}"
            raise ArgumentError("", message, "remove one, or write another run_name")
        self._now[tracker] = RunName(self._before.get(tracker))
        return self._now[tracker]

    def write(self) -> None:
        """Write down the names that were kept; those of trackers that this run hasn't stay."""
        now = {tracker: one.kept for tracker, one in self._now.items() if one.kept is not None}
        names = {**self._before, **now}
        if names:
            _write(self._path, json.dumps(names, indent=2) + "\n")
        else:
            self._path.unlink(missing_ok=True)


@dataclass
class RunName:
    """What a tracker calls this run.

    Attributes:
        earlier: what it called the run that goes on; None if it is a new one, or the tracker is.
        kept: what it calls the run from now on, once the tracker has told.
    """

    earlier: str | None
    kept: str | None = None


class JsonlTracker:
    """Appends one JSON object a row to `metrics.jsonl`, flushed at once so that a killed run keeps its history.

    Rows past `resume_step` belong to an attempt that the run goes back behind, and are dropped.
    """

    def __init__(self, run_directory: Path, resume_step: int | None = None) -> None:
        path = run_directory / METRICS_FILE
        if resume_step is not None and path.exists():
            _keep_up_to(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write one row. A number that is not finite becomes null, since JSON has none."""
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; a last line cut short by a kill is left out."""
    rows: list[dict[str, Any]] = []
    for line in (run_directory / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _keep_up_to(path: Path, step: int) -> None:
    rows = [row for row in read_metrics(path.parent) if row.get("step", 0) <= step]
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
