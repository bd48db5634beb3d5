"""A disk that is really full: a file system in memory, as small as a test needs it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import captured, recipe

# A checkpoint of the tiny model with AdamW's moments takes over 400 KiB; its weights are 85 of them.
ROOMS = {"none": "64k", "two": "1200k"}


def on_a_small_disk(path: Path, disk: Path, size: str, *commands: str) -> list[tuple[int, str]]:
    """What shell commands exit with and say, one after the other, with a new file system of `size` at `disk`."""
    disk.mkdir()
    parts = [f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(disk))} || exit 99"]
    parts += [f"( {command} ) > {path}.{number} 2>&1; echo $?" for number, command in enumerate(commands)]
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "; ".join(parts)]
    done = captured(inside, env={"OMP_NUM_THREADS": "1"})
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    texts = [Path(f"{path}.{number}").read_text() for number in range(len(commands))]
    return list(zip(map(int, done.stdout.split()), texts, strict=True))


def hp_train(path: Path, disk: Path, *arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "hp_core", str(path), f"--output_dir={disk / 'run'}", *arguments])


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path):
    path, disk = recipe(tmp_path), tmp_path / "disk"
    ((code, text), (_, left)) = on_a_small_disk(path, disk, ROOMS["none"], hp_train(path, disk), f"ls {disk}/run")
    assert code == 2, text
    assert "step 1/" not in text
    assert f"output_dir: a checkpoint needs at least 84.6 KiB, and '{disk}/run' has " in text
    assert "free some space, or name another directory" in text
    assert "checkpoints" not in left


@pytest.mark.parametrize(("nproc", "is_async"), [(1, "false"), (2, "true")])
def test_a_disk_that_is_full_in_a_save_costs_no_checkpoint(tmp_path, nproc, is_async):
    path, disk = recipe(tmp_path), tmp_path / "disk"
    ranks = ("--nproc", str(nproc), f"--checkpoint.async={is_async}")
    first, listing, second = on_a_small_disk(
        path,
        disk,
        ROOMS["two"],
        hp_train(path, disk, "--checkpoint.save_every=1", *ranks),
        f"ls {disk}/run/checkpoints",
        # What is kept makes room for what comes.
        hp_train(path, disk, "--checkpoint.resume=latest", "--checkpoint.keep_last=1", *ranks),
    )
    assert first[0] == 1, first
    assert "can't write checkpoint " in first[1]
    assert "No space left on device" in first[1]
    assert first[1].count("error: ") == 1
    assert "Traceback" not in first[1]
    assert listing[1].split() == ["step_00000001", "step_00000002"]
    assert second[0] == 0, second
    assert "(step 2)" in second[1]
    assert "step 6/6" in second[1]
