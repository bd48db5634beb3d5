"""What a run's checkpoints are exported by: its recipe and assets, and earlier ones where a resume has changed them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hp_core.observe.run_directory import ASSETS, EARLIER, RECIPE_FILE

_UNTIL = "until_step_"


def settings_of_step(run_directory: Path, step: int) -> Path:
    """The folder with the `recipe.yaml` and the `assets/` that the checkpoint after `step` was made with."""
    later = [(until, path) for until, path in _earlier(run_directory) if until >= step]
    return min(later)[1] if later else run_directory


def write_settings(run_directory: Path, recipe: str, assets: Mapping[str, bytes], resumed: int | None) -> None:
    """Put them in the run's directory; checkpoints up to step `resumed` keep those that they were made with.

    Whenever this is cut off, doing it again ends the same.
    """
    files = {RECIPE_FILE: recipe.encode(), **{f"{ASSETS}/{name}": content for name, content in assets.items()}}
    if resumed is not None:
        before = settings_of_step(run_directory, resumed)
        held = _files(before)
        if held not in ({}, files):
            _place(run_directory / EARLIER / f"{_UNTIL}{resumed}", held)
    for until, path in list(_earlier(run_directory)):
        if resumed is None or until > resumed:
            shutil.rmtree(path)
    for path in (run_directory / ASSETS).rglob("*"):
        if path.is_file() and path.relative_to(run_directory).as_posix() not in files:
            path.unlink()
    _write(run_directory, files)


def _earlier(run_directory: Path) -> Iterator[tuple[int, Path]]:
    for path in (run_directory / EARLIER).glob(f"{_UNTIL}*"):
        number = path.name.removeprefix(_UNTIL)
        if number.isdecimal():
            yield int(number), path


def _files(folder: Path) -> dict[str, bytes]:
    paths = [folder / RECIPE_FILE, *(folder / ASSETS).rglob("*")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _place(folder: Path, files: Mapping[str, bytes]) -> None:
    if folder.exists():
        return  # they are what was found
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    _write(partial, files)
    partial.rename(folder)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
