"""Finding out before the first step whether a checkpoint can be written at all."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from hp_core.checkpoint.layout import CHECKPOINTS
from hp_core.errors import InputError, Problem


def require_room(run_directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a directory that no checkpoint can be written to, or that has no room for one.

    Args:
        run_directory: the run's, which is there.
        tensors: what a checkpoint will hold at the least. An optimizer makes its state in the first step only.

    Raises:
        InputError: says what is in the way, with numbers.
    """
    checkpoints = run_directory / CHECKPOINTS
    place = checkpoints if checkpoints.exists() else run_directory
    try:
        probe = place / ".writable"
        probe.touch()
        probe.unlink()
        usage = shutil.disk_usage(place)
    except OSError as error:
        message = f"can't write to {str(place)!r}: {error.strerror}"
        raise InputError(Problem(message, path="output_dir", hint="name another directory")) from error
    needed = sum(math.prod(one.shape) * one.element_size() for one in tensors.values())
    # Some network file systems know of no size.
    if usage.total and usage.free < needed:
        message = f"a checkpoint needs at least {in_bytes(needed)}, and {str(place)!r} has {in_bytes(usage.free)} left"
        raise InputError(Problem(message, path="output_dir", hint="free some space, or name another directory"))


def in_bytes(number: int) -> str:
    """A number of bytes as people read it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
