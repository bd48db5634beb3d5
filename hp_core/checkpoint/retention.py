"""Which checkpoints a run keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hp_core.checkpoint.layout import complete_checkpoints, put_aside, remove
from hp_core.config.checkpoint import CheckpointConfig, KeepBestConfig
from hp_core.errors import InputError

Metrics = Mapping[str, Any]


def steps_to_delete(recorded: Mapping[int, Metrics], settings: CheckpointConfig) -> list[int]:
    """The steps whose checkpoints the recipe no longer wants, in order.

    Args:
        recorded: the complete checkpoints: the metrics of each by its step.
        settings: `keep_last`; without it everything is kept. `keep_every` and `keep_best` keep more.
    """
    if settings.keep_last is None:
        return []
    steps = sorted(recorded)
    kept = set(steps[-settings.keep_last :]) | _best(recorded, settings.keep_best)
    if settings.keep_every is not None:
        kept |= {step for step in steps if step % settings.keep_every == 0}
    return [step for step in steps if step not in kept]


def prune(run_directory: Path, settings: CheckpointConfig) -> list[str]:
    """Delete what the recipe no longer wants; called when a new checkpoint is complete, by one process.

    What was set aside when the run went back goes once the run has a checkpoint of as late a step.

    Returns:
        What could not be deleted and why, a line for each: that is no reason to end a run.
    """
    if settings.keep_last is None:
        return []
    checkpoints = {one.step: one for one in complete_checkpoints(run_directory)}
    problems: list[str] = []
    recorded: dict[int, Metrics] = {}
    for step, checkpoint in checkpoints.items():
        try:
            recorded[step] = checkpoint.trainer_state().get("metrics", {})
        except InputError as error:
            # What can't be read is neither counted nor deleted.
            problems.append(str(error))
    newest = max(recorded, default=-1)
    unwanted = [checkpoints[step].path for step in steps_to_delete(recorded, settings)]
    unwanted += [path for step, path in put_aside(run_directory) if step <= newest]
    for path in unwanted:
        try:
            remove(path)
        except OSError as error:
            problems.append(f"can't delete {path}: {error.strerror}")
    return problems


def _best(recorded: Mapping[int, Metrics], settings: KeepBestConfig) -> set[int]:
    if settings.metric is None:
        return set()
    sign = 1 if settings.mode == "min" else -1
    values = {step: metrics.get(settings.metric) for step, metrics in recorded.items()}
    known = [(sign * value, -step) for step, value in values.items() if _is_number(value)]
    # Of equals the newer.
    return {-step for _, step in sorted(known)[: settings.count]}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
