"""Where metrics go: the tracker interface, its runs' names, and the JSON-lines file that every run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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


def recall(run_directory: Path, tracker: str) -> str | None:
    """What a tracker calls the run that goes on in the directory, if `remember` was told."""
    path = run_directory / TRACKERS_FILE
    found: str | None = json.loads(path.read_text(encoding="utf-8")).get(tracker) if path.exists() else None
    return found


def remember(run_directory: Path, tracker: str, name: str) -> None:
    """Keep what a tracker calls this run."""
    path = run_directory / TRACKERS_FILE
    names = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    _write(path, json.dumps({**names, tracker: name}, indent=2) + "\n")


def forget(run_directory: Path) -> None:
    """Drop what trackers called an earlier run of the directory."""
    (run_directory / TRACKERS_FILE).unlink(missing_ok=True)


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
