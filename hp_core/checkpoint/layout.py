"""Where checkpoints lie and which of them are complete; reads names and small files only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_core.errors import InputError, Problem

CHECKPOINTS = "checkpoints"
TRAINER_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
METADATA = ".metadata"
FILES = "files.json"
_NEEDED = (METADATA, TRAINER_STATE, MANIFEST)
# Since 2 a checkpoint has a list of its files, without which it is incomplete.
FORMAT = 2

_FINAL = re.compile(r"step_(\d+)")
_NOT_FINAL = re.compile(r"step_(\d+)\.(?:tmp|old)")
_ABANDONED = "abandoned_"
_REMOVED = "removed_"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the model, optimizer and run after `step` steps."""

    path: Path
    step: int

    def trainer_state(self) -> dict[str, Any]:
        """The run's counters and what else is not a tensor."""
        return read_json(self.path, TRAINER_STATE)

    def manifest(self) -> dict[str, Any]:
        """The manifest of the run that wrote it."""
        return read_json(self.path, MANIFEST)

    @property
    def is_listed(self) -> bool:
        """Whether it lists its files, so that they can be verified."""
        return (self.path / FILES).exists() or self.trainer_state().get("format", 1) >= FORMAT


@dataclass(frozen=True)
class PassedOver:
    """A directory that is newer than the checkpoint a run goes on from, and why it isn't used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"passed over {self.path}: {self.reason}"


@dataclass(frozen=True)
class Search:
    """The newest complete checkpoint of a run, if any, and the directories that were passed over."""

    newest: Checkpoint | None
    passed_over: tuple[PassedOver, ...]


def step_directory(run_directory: Path, step: int) -> Path:
    """The final name of the checkpoint after `step` steps."""
    return run_directory / CHECKPOINTS / f"step_{step:08d}"


def as_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None when it is not a complete one."""
    match = _FINAL.fullmatch(path.name)
    return Checkpoint(path, int(match.group(1))) if match and _has_all_files(path) else None


def complete_checkpoints(run_directory: Path) -> list[Checkpoint]:
    """A run's complete checkpoints, in the order of their steps."""
    found = (as_checkpoint(path) for path in (run_directory / CHECKPOINTS).glob("step_*"))
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def search(run_directory: Path, broken: Mapping[Path, str] | None = None) -> Search:
    """Look for the newest complete checkpoint by step number; what is newer but incomplete is passed over.

    Args:
        run_directory: the run's.
        broken: checkpoints that are passed over too, and what is wrong with them.
    """
    passed_over: list[PassedOver] = []
    for path in _by_step(run_directory):
        checkpoint = as_checkpoint(path) or _unfinished_replacement(path)
        reason = (broken or {}).get(path)
        if checkpoint is not None and reason is None:
            return Search(checkpoint, tuple(passed_over))
        passed_over.append(PassedOver(path, reason or incomplete(path)))
    return Search(None, tuple(passed_over))


def set_aside(run_directory: Path, *, after: int) -> None:
    """Rename the checkpoints past step `after`: they are of an attempt that the run has gone back behind."""
    for path in sorted((run_directory / CHECKPOINTS).glob("step_*")):
        match = _FINAL.fullmatch(path.name)
        if match and int(match.group(1)) > after:
            aside = path.with_name(_ABANDONED + path.name)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def put_aside(run_directory: Path) -> list[tuple[int, Path]]:
    """The step and path of what `set_aside` has renamed, in the order of their steps."""
    found = []
    for path in (run_directory / CHECKPOINTS).glob(f"{_ABANDONED}step_*"):
        match = _FINAL.fullmatch(path.name.removeprefix(_ABANDONED))
        if match:
            found.append((int(match.group(1)), path))
    return sorted(found)


def named(path: Path, broken: Mapping[Path, str] | None = None) -> Search:
    """The checkpoint that `checkpoint.resume: PATH` names: a checkpoint directory, or a run's newest.

    Args:
        path: what the recipe names.
        broken: what is known to be broken, as for `search`.

    Raises:
        InputError: there is no complete checkpoint at `path`, or it is broken.
    """
    checkpoint = as_checkpoint(path)
    reason = (broken or {}).get(path)
    if checkpoint is not None and reason is not None:
        hint = f"name an older one, or the run for its newest intact one: {path.parent.parent}"
        raise InputError(Problem(f"can't resume from {str(path)!r}: {reason}", path="checkpoint.resume", hint=hint))
    if checkpoint is not None:
        return Search(checkpoint, ())
    if is_step(path):
        hint = f"name an older one, or the run for its newest intact one: {path.parent.parent}"
        message = f"can't resume from {str(path)!r}: {incomplete(path)}"
        raise InputError(Problem(message, path="checkpoint.resume", hint=hint))
    found = search(path, broken)
    if found.newest is None:
        reason = "no such directory" if not path.is_dir() else "no complete checkpoint in it"
        reasons = "; ".join((reason, *map(str, found.passed_over)))
        hint = hint_of_run(path) or "name a run directory or a step_… directory in its checkpoints/, or write latest"
        raise InputError(Problem(f"can't resume from {str(path)!r}: {reasons}", path="checkpoint.resume", hint=hint))
    return found


def is_step(path: Path) -> bool:
    """Whether there is a directory that has a checkpoint's name, complete or not."""
    return _FINAL.fullmatch(path.name) is not None and path.is_dir()


def incomplete(path: Path) -> str:
    """What a directory lacks that is no complete checkpoint: for whoever comes upon it, in the same words."""
    if not is_step(path):
        return "incomplete"  # writing was never finished, and what is there says nothing
    missing = [name for name in _NEEDED if not (path / name).is_file()] or [FILES]
    *first, last = missing
    return f"incomplete: {', '.join(first)} and {last} are missing" if first else f"incomplete: {last} is missing"


def hint_of_run(path: Path) -> str:
    """What to write instead of the directory that a run keeps its checkpoints in; nothing for any other path."""
    if path.name != CHECKPOINTS or not complete_checkpoints(path.parent):
        return ""
    return f"these are the checkpoints of a run; name the run itself: {path.parent}"


def clean(run_directory: Path) -> None:
    """Remove what a killed process has left half written or half removed. Only the run's owner calls it."""
    checkpoints = run_directory / CHECKPOINTS
    for path in checkpoints.glob("step_*.old"):
        final = path.with_suffix("")
        if _NOT_FINAL.fullmatch(path.name) and not final.exists():
            # Killed between the two renames of `put_in_place`.
            path.rename(final)
    for path in checkpoints.glob("*"):
        if _NOT_FINAL.fullmatch(path.name) or path.name.startswith(_REMOVED):
            shutil.rmtree(path)


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a directory that is complete its final name; one that has the name goes only once this one is there."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint, which doesn't count from the first moment, whenever the process is killed.

    Raises:
        OSError: it can't be removed.
    """
    removed = path.with_name(_REMOVED + path.name)
    if removed.exists():
        shutil.rmtree(removed)
    path.rename(removed)
    shutil.rmtree(removed)


def own_file(directory: Path, name: str) -> Path:
    """The file called `name` in a checkpoint.

    Raises:
        InputError: it lies elsewhere: the name is a path, or a link leads out of the checkpoint.
    """
    path = directory / name
    if Path(name).name != name or path.resolve().parent != directory.resolve():
        raise InputError(f"{directory}: {name!r} is not in the checkpoint: nothing outside of it is read")
    return path


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """An object that a checkpoint keeps as JSON.

    Raises:
        InputError: it can't be read.
    """
    path = own_file(directory, name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _by_step(run_directory: Path) -> Iterator[Path]:
    """Whatever is or was to become a checkpoint, the newest first."""
    found: list[tuple[int, str, Path]] = []
    for path in (run_directory / CHECKPOINTS).glob("step_*"):
        match = _FINAL.fullmatch(path.name) or _NOT_FINAL.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path.name, path))
    return (path for _, _, path in sorted(found, reverse=True))


def _unfinished_replacement(path: Path) -> Checkpoint | None:
    """A checkpoint that was about to be replaced when the process was killed, and has lost its name."""
    match = _NOT_FINAL.fullmatch(path.name)
    if match is None or path.suffix != ".old" or path.with_suffix("").exists() or not _has_all_files(path):
        return None
    return Checkpoint(path, int(match.group(1)))


def _has_all_files(path: Path) -> bool:
    return all((path / name).is_file() for name in _NEEDED)
