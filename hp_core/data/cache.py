"""A directory of results that are built once, by whichever process comes first, and are complete or absent."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from hp_core.errors import InputError, RunError


def cache_directory(configured: str | None = None) -> Path:
    """The recipe's `cache_dir`, else `HP_CACHE_DIR`, else `hyperparallel` in the user's cache directory."""
    if configured:
        return Path(configured).expanduser()
    if from_environment := os.environ.get("HP_CACHE_DIR"):
        return Path(from_environment).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hyperparallel"


def build_once(
    cache_dir: Path, key: str, write: Callable[[Path], None], *, is_complete: Callable[[Path], bool]
) -> Path:
    """The directory `cache_dir/key`, filled by `write` unless it is there already.

    `write` fills a temporary sibling, which is renamed when it is done, so a killed process leaves nothing that
    looks finished. Processes that want the same key wait for the first one, on every machine that shares the
    directory. A directory that `is_complete` refuses (damaged since) is built again.
    """
    directory = cache_dir / key
    if is_complete(directory):
        return directory
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        held = FileLock(cache_dir / f"{key}.lock").acquire()
    except OSError as error:
        raise InputError(
            f"the data cache {str(cache_dir)!r} can't be written: {error.strerror or error}"
            "; set HP_CACHE_DIR or cache_dir to a directory you own"
        ) from error
    with held:
        if not is_complete(directory):
            _build(directory, write)
    return directory


def _build(directory: Path, write: Callable[[Path], None]) -> None:
    # Nobody else writes while the lock is held, so whatever temporary directory is here was left by a killed process.
    for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = directory.with_name(f"{directory.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        write(temporary)
        for path in temporary.iterdir():
            _flush_to_disk(path)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
        _flush_to_disk(directory.parent)
    except OSError as error:
        raise RunError(f"the data cache {str(directory.parent)!r} can't be filled: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
