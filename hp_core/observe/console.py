"""What the main rank shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Console:
    """Talks to the user on the main rank; silent on the others. Use it as a context manager."""

    def __init__(self, *, enabled: bool, num_steps: int = 0, first_step: int = 0) -> None:
        self._enabled = enabled
        self._num_steps = num_steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._console = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Console:
        if self._enabled and self._console.is_terminal and self._num_steps:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("ETA {task.fields[eta]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "", total=self._num_steps, completed=self._first_step, numbers="", eta="-"
            )
            self._progress.start()
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._enabled:
            (self._progress.console if self._progress else self._console).print(text, markup=False)

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a logged step."""
        if not self._enabled:
            return
        numbers = _numbers(metrics)
        eta = self.eta(metrics["step"])
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=metrics["step"], numbers=numbers, eta=eta)
        else:
            self.say(f"step {metrics['step']}/{self._num_steps}  {numbers}  ETA {eta}")

    def eta(self, step: int) -> str:
        """The time left at this run's own pace, as `h:mm:ss`; `-` before the first step."""
        done = step - self._first_step
        if done < 1:
            return "-"
        left = round((time.monotonic() - self._started) / done * (self._num_steps - step))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"


def _numbers(metrics: Mapping[str, Any]) -> str:
    skipped = metrics.get("skipped")
    loss = metrics.get("loss")
    parts = [f"skipped: {skipped}" if skipped else f"loss {loss:.4f}" if loss is not None else "loss -"]
    if metrics.get("grad_norm") is not None:
        parts.append(f"grad norm {metrics['grad_norm']:.3f}")
    parts.append(f"lr {metrics['lr']:.3g}")
    if metrics.get("tokens_per_second") is not None:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)
