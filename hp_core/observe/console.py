"""What the main rank shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Console:
    """Talks to the user on the main rank; silent on the others."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._console = RichConsole(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._first_step = 0
        self._num_steps = 0
        self._started = 0.0

    @contextmanager
    def training(self, *, first_step: int, num_steps: int) -> Iterator[None]:
        """Show the progress from `first_step` to `num_steps` while steps are taken."""
        self._first_step, self._num_steps, self._started = first_step, num_steps, time.monotonic()
        if not (self._enabled and self._console.is_terminal):
            yield
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
        )
        try:
            with Progress(*columns, console=self._console) as self._progress:
                self._task = self._progress.add_task("", total=num_steps, completed=first_step, numbers="", eta="-")
                yield
        finally:
            self._progress = None

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._enabled:
            (self._progress.console if self._progress else self._console).print(text, markup=False)

    def leave(self, text: str) -> None:
        """Print a line and leave the terminal as it was found: the process ends at once."""
        self.say(text)
        if self._enabled:
            self._console.show_cursor(True)

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
