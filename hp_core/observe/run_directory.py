"""A run's directory: where it is, whether it may be used, and the files that say what ran."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hp_core.checkpoint.layout import CHECKPOINTS, MANIFEST, Checkpoint, Search, clean, named, search, set_aside
from hp_core.errors import InputError, Problem
from hp_core.observe.trackers import METRICS_FILE

RECIPE_FILE = "recipe.yaml"
SAMPLES_FILE = "samples.jsonl"
PLAN_FILE = "plan.json"
PROFILE = "profile"
# What an export of the model holds beside its weights.
ASSETS = "assets"
# The recipe and the assets of checkpoints that were made with others than the run's last.
EARLIER = "earlier"
_RUN_FILES = (MANIFEST, METRICS_FILE, SAMPLES_FILE, PLAN_FILE, PROFILE, ASSETS, EARLIER, CHECKPOINTS)


@dataclass(frozen=True)
class RunDirectory:
    """Where a run writes, and the checkpoint it goes on from, if any.

    `continues` is true when the run goes on in the directory of the checkpoint: it appends to what is there;
    `reserved` when the directory was made for its name.
    """

    path: Path
    checkpoint: Checkpoint | None = None
    continues: bool = False
    messages: tuple[str, ...] = ()
    reserved: bool = False


def run_name(recipe: Path) -> str:
    """What a recipe's runs are called: its file's name, or its folder's when the file is just `recipe.yaml`."""
    return recipe.resolve().parent.name if recipe.stem == "recipe" else recipe.stem


def choose(
    *,
    recipe: Path,
    output_dir: str | None,
    resume: str | None,
    overwrite: bool,
    now: datetime,
    broken: Mapping[Path, str] | None = None,
) -> RunDirectory:
    """Decide where the run writes and what it resumes from. A directory with a made-up name is made at once.

    `broken` are checkpoints that are passed over, and what is wrong with them.

    Raises:
        InputError: the directory already holds a run, or there is nothing to resume from at a path.
    """
    if resume is not None and overwrite:
        raise InputError(Problem("a run that resumes appends; it can't overwrite", path="checkpoint.resume"))
    name = f"{run_name(recipe)}-{now:%Y%m%d-%H%M%S}"
    if resume == "latest":
        where = [Path(output_dir)] if output_dir else _earlier_runs(recipe)
        return _latest(where, lambda: Path(output_dir) if output_dir else _reserve(Path("runs"), name), broken)
    if resume is not None:
        found = named(Path(resume), broken)
        home = _home(found)
        path = Path(output_dir) if output_dir else home or _reserve(Path("runs"), name)
        continues = home is not None and path.resolve() == home.resolve()
        if not continues:
            _refuse_used(path, overwrite=False)
        return RunDirectory(path, found.newest, continues, _resumed(found), reserved=not output_dir and home is None)
    fresh = Path(output_dir) if output_dir else _reserve(Path("runs"), name)
    _refuse_used(fresh, overwrite)
    return RunDirectory(fresh, reserved=output_dir is None)


def require_apart(recipe: Path, output_dir: str | None, resume: str | None = None, *, overwrite: bool = False) -> None:
    """Refuse to write where the recipe is.

    Raises:
        InputError: the run's resolved recipe would have its name.
    """
    if output_dir is not None and (Path(output_dir) / RECIPE_FILE).resolve() == recipe.resolve():
        message = "is the recipe's own folder, where the run's resolved recipe would replace it"
        hint = _instead(recipe, Path(output_dir), resume, overwrite)
        raise InputError(Problem(f"{output_dir!r} {message}", path="output_dir", hint=hint))


def _instead(recipe: Path, path: Path, resume: str | None, overwrite: bool) -> str:
    """What does with a run's own recipe what was asked for; that of a folder without a run is any recipe."""
    if not _holds_run(path):
        return "name another directory"
    if resume is None and not overwrite:
        return f"run it again elsewhere: --output_dir={shlex.quote(str(_free(path)))}"
    copy = shlex.quote(str(_free(Path(f"{run_name(recipe)}.yaml"))))
    how = "--overwrite" if overwrite else shlex.quote(f"--checkpoint.resume={resume}")
    what = "replace the run" if overwrite else "go on"
    command = f"hp-train {copy} --output_dir={shlex.quote(str(path))} {how}"
    return f"{what} by a copy of it: cp {shlex.quote(str(recipe))} {copy} && {command}"


def _free(path: Path) -> Path:
    """The path, or with a number what is not there yet."""
    names = (path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return next(one for one in names if not one.exists())


def release(directory: RunDirectory) -> None:
    """Take back a directory that was reserved and never used."""
    if directory.reserved:
        with suppress(OSError):
            # Only an empty one goes.
            directory.path.rmdir()


def make(directory: RunDirectory) -> None:
    """Make the directory.

    Raises:
        InputError: it can't be made or written to.
    """
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        probe = directory.path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        message = f"can't write to {str(directory.path)!r}: {error.strerror}"
        raise InputError(Problem(message, path="output_dir", hint="name another directory")) from error


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Inside, this process and those that it starts make nothing that everybody may write to, whatever the umask."""
    before = os.umask(0)
    os.umask(before | 0o002)
    try:
        yield
    finally:
        os.umask(before)


def lock(directory: RunDirectory) -> FileLock:
    """Hold the directory for this run until the lock is released or the process ends, however it ends.

    Raises:
        InputError: another run holds it.
    """
    held = FileLock(directory.path / ".lock", blocking=False)
    try:
        held.acquire()
    except Timeout:
        message = f"another run is writing to {str(directory.path)!r}"
        raise InputError(Problem(message, path="output_dir", hint="wait for it, or name another directory")) from None
    return held


def clear(directory: RunDirectory, *, overwrite: bool) -> None:
    """Clear an old run out of the directory when `overwrite` is given, and set one that goes back, back.

    What a process that was killed has left half done goes too.
    """
    if overwrite:
        for name in _RUN_FILES:
            path = directory.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    clean(directory.path)
    if directory.continues:
        # Also where none can be used: broken ones of later steps would count as the newest.
        set_aside(directory.path, after=directory.checkpoint.step if directory.checkpoint is not None else -1)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` so that a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_manifest(run_directory: Path) -> dict[str, Any]:
    """The manifest of the run that a directory holds; empty if there is none that can be read."""
    try:
        value = json.loads((run_directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def versions() -> dict[str, str]:
    """The versions that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in ("hyperparallel", "torch", "transformers", "tokenizers", "datasets", "numpy", "pluggy", "pydantic"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _latest(where: list[Path], fresh: Callable[[], Path], broken: Mapping[Path, str] | None) -> RunDirectory:
    passed: list[str] = []
    for path in where:
        found = search(path, broken)
        if found.newest is not None:
            return RunDirectory(path, found.newest, True, (*passed, *_resumed(found)))
        passed += map(str, found.passed_over)
    nothing = "checkpoint.resume is latest and no complete checkpoint was found: starting at step 0"
    path = fresh()
    continues = any(other.resolve() == path.resolve() and _holds_run(other) for other in where)
    return RunDirectory(path, None, continues, (*passed, nothing), reserved=not continues)


def _home(found: Search) -> Path | None:
    """The run that a checkpoint belongs to; None for one that was copied out of its run."""
    assert found.newest is not None
    checkpoints = found.newest.path.parent
    # A path relative to the folder itself has no names to go by.
    if checkpoints.name != CHECKPOINTS:
        checkpoints = checkpoints.resolve()
    return checkpoints.parent if checkpoints.name == CHECKPOINTS else None


def _resumed(found: Search) -> tuple[str, ...]:
    assert found.newest is not None
    return (*map(str, found.passed_over), f"resuming from {found.newest.path} (step {found.newest.step})")


def _earlier_runs(recipe: Path) -> list[Path]:
    """Runs of this recipe under `runs/`, newest first: their names end with the date and time, and a number."""
    name = re.compile(re.escape(run_name(recipe)) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found: list[tuple[str, int, Path]] = []
    for path in Path("runs").glob("*"):
        match = name.fullmatch(path.name)
        if match is not None and _holds_run(path):
            found.append((match.group(1), int(match.group(2) or 1), path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _refuse_used(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(Problem(f"{str(path)!r} is a file", path="output_dir"))
    _refuse_unwritable(path)
    if _holds_run(path) and not overwrite:
        raise InputError(
            Problem(
                f"{str(path)!r} already holds a run",
                path="output_dir",
                hint="go on with --checkpoint.resume=latest, replace it with --overwrite, or name another directory",
            )
        )


def _refuse_unwritable(path: Path) -> None:
    """Found before the data is read, not after."""
    place = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not os.access(place, os.W_OK):
        raise InputError(Problem(f"can't write to {str(place)!r}", path="output_dir", hint="name another directory"))


def _holds_run(path: Path) -> bool:
    return any((path / name).exists() for name in _RUN_FILES)


def _reserve(parent: Path, name: str) -> Path:
    """Make a directory of this name, or of it and a number: two runs that start together get one each."""
    for number in count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(Problem(f"can't make {str(path)!r}: {error.strerror}", path="output_dir")) from error
    raise AssertionError("count never ends")
