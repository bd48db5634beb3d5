"""When a run saves, what it tells of its checkpoints, and what its ranks agree on before each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hp_core.checkpoint.saver import Contents, Saver
from hp_core.errors import noting
from hp_core.training.metric_names import unmeasured
from hp_core.training.run import Run


class Checkpointing:
    """Saves a run's checkpoints and says so. Entered around the loop: a save in flight is waited for at the end.

    Args:
        run: the run, whose directory is there.
        contents: gives what a checkpoint holds now. Every rank calls it.
    """

    def __init__(self, run: Run, contents: Callable[[], Contents]) -> None:
        self._run = run
        self._contents = contents
        self._settings = run.config.checkpoint
        self._saver = Saver(run.directory.path, self._settings, run.setup)
        resumed, own = run.directory.checkpoint, run.directory.path.resolve()
        # A checkpoint of another run is none of this one's.
        is_own = resumed is not None and own in resumed.path.resolve().parents
        self._saved_step = self._complete_step = resumed.step if resumed is not None and is_own else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._announce(self._saver.finish())
        else:
            self._saver.abandon()

    def is_due(self) -> bool:
        """Whether the recipe wants a checkpoint of this step."""
        return bool(self._settings.save_every) and self._run.state.step % self._settings.save_every == 0

    @property
    def is_saved(self) -> bool:
        """Whether the run's directory has a complete checkpoint of this step. Any thread may ask."""
        step = self._run.state.step
        return step == self._complete_step or (step == self._saved_step and self._saver.is_done)

    def save(self) -> None:
        """Save, unless the run's directory has a checkpoint of this step. Every rank calls it."""
        step = self._run.state.step
        if step != self._saved_step:
            with noting(lambda: f"saving after step {step}, rank {self._run.setup.rank}"):
                # Announced before the next save can take its place.
                self._announce(self._saver.finish())
                done = self._saver.start(self._contents())
                # Not before: a signal's thread asks which step a finished save is of.
                self._saved_step = step
                self._announce(done)

    def complete(self, *, is_last: bool) -> None:
        """Save this step again if its checkpoint lacks the evaluation that it is judged by. Every rank calls it.

        A stop inside the evaluation leaves it so; it can never be among the best until this is made up for. One of a
        step that the recipe doesn't ask to save is none to be judged.
        """
        metric = self._settings.keep_best.metric or ""
        is_wanted = self.is_due() or (is_last and self._settings.save_last)
        if metric.startswith("eval_") and is_wanted and self._saved_step == self._run.state.step:
            self._saved_step = None
            self.save()

    def flags(self, *, stop: bool) -> list[int]:
        """What this rank adds to what all must know before the next step."""
        return [int(stop), int(self._saver.has_failed), int(self._saver.is_done)]

    def settle(self, flags: Sequence[int]) -> bool:
        """Heed the sums of all ranks' `flags`; returns whether any rank was asked to stop.

        Raises:
            RunError: a save in the background has failed on some rank.
        """
        stop, failed, done = flags
        if failed or done == self._run.setup.world_size:
            self._announce(self._saver.finish())
        return bool(stop)

    def require_metric(self, row: Mapping[str, Any], *, prefix: str = "") -> None:
        """Refuse to go on when the metric that checkpoints are judged by isn't in the rows that it belongs to.

        Raises:
            InputError: `row` lacks it.
        """
        metric = self._settings.keep_best.metric
        if metric is None or metric in row or "skipped" in row or metric.startswith("eval_") != (prefix == "eval_"):
            return
        numbers = [name for name, value in row.items() if isinstance(value, (int, float)) and name != "step"]
        raise unmeasured(metric, numbers)

    def _announce(self, paths: list[Path]) -> None:
        for path in paths:
            self._complete_step = int(path.name.rpartition("_")[2])
            self._run.console.say(f"step {self._complete_step}: saved {path}")
            self._run.plugins.hook.on_checkpoint(run=self._run, path=path)
        for note in self._saver.take_notes():
            self._run.console.say(note)
