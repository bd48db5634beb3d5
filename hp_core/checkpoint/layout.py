"""Where checkpoints lie and which of them are complete; reads names and small files only."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_core.errors import InputError, Problem

CHECKPOINTS = "checkpoints"
TRAINER_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
METADATA = ".metadata"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the model, optimizer and run after `step` steps."""

    path: Path
    step: int

    def trainer_state(self) -> dict[str, Any]:
        """The run's counters and what else is not a tensor."""
        return _read_json(self.path / TRAINER_STATE)

    def manifest(self) -> dict[str, Any]:
        """The manifest of the run that wrote it."""
        return _read_json(self.path / MANIFEST)


@dataclass(frozen=True)
class Search:
    """The newest complete checkpoint of a run, if any, and the directories that were passed over."""

    newest: Checkpoint | None
    passed_over: tuple[Path, ...]


def step_directory(run_directory: Path, step: int) -> Path:
    """The final name of the checkpoint after `step` steps."""
    return run_directory / CHECKPOINTS / f"step_{step:08d}"


def as_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None when it is not a complete one."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    complete = all((path / name).is_file() for name in (METADATA, TRAINER_STATE, MANIFEST))
    return Checkpoint(path, int(match.group(1))) if match and complete else None


def search(run_directory: Path) -> Search:
    """Look for the newest complete checkpoint by step number; what is newer but incomplete is passed over."""
    candidates = [path for path in (run_directory / CHECKPOINTS).glob("step_*") if path.is_dir()]
    candidates.sort(key=lambda path: int((re.findall(r"\d+", path.name) or ["-1"])[0]), reverse=True)
    passed_over: list[Path] = []
    for path in candidates:
        checkpoint = as_checkpoint(path)
        if checkpoint is not None:
            return Search(checkpoint, tuple(passed_over))
        passed_over.append(path)
    return Search(None, tuple(passed_over))


def set_aside(run_directory: Path, *, after: int) -> None:
    """Rename the checkpoints past step `after`: they are of an attempt that the run has gone back behind."""
    for path in sorted((run_directory / CHECKPOINTS).glob("step_*")):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match and int(match.group(1)) > after:
            aside = path.with_name(f"abandoned_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def named(path: Path) -> Search:
    """The checkpoint that `checkpoint.resume: PATH` names: a checkpoint directory, or a run's newest.

    Raises:
        InputError: there is no complete checkpoint at `path`.
    """
    checkpoint = as_checkpoint(path)
    if checkpoint is not None:
        return Search(checkpoint, ())
    found = search(path)
    if found.newest is None:
        reason = "no such directory" if not path.is_dir() else "no complete checkpoint in it"
        raise InputError(
            Problem(
                f"can't resume from {str(path)!r}: {reason}",
                path="checkpoint.resume",
                hint="name a run directory or a step_… directory in its checkpoints/, or write latest",
            )
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
