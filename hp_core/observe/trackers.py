"""Where metrics go: the tracker interface and the JSON-lines file that every run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """A sink for metrics; lives on the main rank only."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Take one row. It has a `step`; a value is a number, a text, or None where there is no number to tell."""
        ...

    def close(self) -> None:
        """Flush and let go of files; called once, also when the run fails."""
        ...


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
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(path)
