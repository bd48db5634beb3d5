"""Which directories are checkpoints, whenever a process was killed while it wrote, replaced or removed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hp_core.checkpoint import layout
from hp_core.checkpoint.layout import PassedOver, clean, named, put_in_place, search, set_aside, step_directory
from hp_core.errors import InputError
from tests.checkpoint.test_retention import a_checkpoint, names


class Killed(BaseException):
    """What no code catches."""


def renames_until(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process die at the `number`-th rename."""
    count, rename = 0, Path.rename

    def counted(path: Path, target: Path) -> Path:
        nonlocal count
        if count == number:
            raise Killed
        count += 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", counted)


@pytest.mark.parametrize("number", [0, 1])
def test_a_replacement_that_is_killed_leaves_the_old_checkpoint(tmp_path, monkeypatch, number):
    old = a_checkpoint(tmp_path, 5, loss=1.0)
    new = a_checkpoint(tmp_path, 6, loss=2.0)
    temporary = new.rename(old.with_name("step_00000005.tmp"))
    renames_until(monkeypatch, number)
    with pytest.raises(Killed):
        put_in_place(temporary, old)
    monkeypatch.undo()
    found = search(tmp_path).newest
    assert found is not None
    assert (found.step, found.trainer_state()) == (5, {"metrics": {"loss": 1.0}})
    clean(tmp_path)
    assert names(tmp_path) == ["step_00000005"]
    found = search(tmp_path).newest
    assert found is not None
    assert (found.path, found.trainer_state()) == (old, {"metrics": {"loss": 1.0}})


def test_an_old_one_does_not_count_beside_the_new(tmp_path):
    path = a_checkpoint(tmp_path, 5, loss=2.0)
    a_checkpoint(tmp_path, 4).rename(path.with_name("step_00000005.old"))
    assert search(tmp_path).newest == layout.Checkpoint(path, 5)
    path.joinpath(layout.METADATA).unlink()
    assert search(tmp_path).newest is None
    clean(tmp_path)
    assert names(tmp_path) == ["step_00000005"]


def test_cleaning_leaves_everything_else(tmp_path):
    a_checkpoint(tmp_path, 1)
    kept = ["abandoned_step_00000003", "notes.txt", "step_00000001", "step_7.tmp.bak"]
    for name in (*kept, "step_00000002.tmp", "removed_step_00000004"):
        (tmp_path / "checkpoints" / name).mkdir(exist_ok=True)
    clean(tmp_path)
    assert names(tmp_path) == kept
    clean(tmp_path / "nowhere")


def test_the_order_is_that_of_numbers(tmp_path):
    for step in (9, 10):
        a_checkpoint(tmp_path, step)
    # Written by hand, or by more digits than eight.
    a_checkpoint(tmp_path, 8).rename(tmp_path / "checkpoints" / "step_123456789")
    assert [one.step for one in layout.complete_checkpoints(tmp_path)] == [9, 10, 123456789]
    set_aside(tmp_path, after=10)
    assert search(tmp_path).newest == layout.Checkpoint(step_directory(tmp_path, 10), 10)


def test_broken_ones_are_passed_over_and_told(tmp_path):
    paths = [a_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    broken = {paths[2]: "a.distcp has 3 of 4 bytes", paths[0]: "not looked at"}
    found = search(tmp_path, broken)
    assert found.newest == layout.Checkpoint(paths[1], 2)
    assert found.passed_over == (PassedOver(paths[2], "a.distcp has 3 of 4 bytes"),)
    assert named(tmp_path, broken) == found
    with pytest.raises(InputError, match=r"a\.distcp has 3 of 4 bytes; name an older one, or the run for its newest"):
        named(paths[2], broken)
    all_broken = {path: f"broken {path.name[-1]}" for path in paths}
    with pytest.raises(InputError) as caught:
        named(tmp_path, all_broken)
    assert [text in str(caught.value) for text in ("broken 1", "broken 2", "broken 3")] == [True] * 3


def test_nothing_outside_of_a_checkpoint_is_read(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    (tmp_path / "secret.json").write_text('{"a": 1}')
    (path / layout.TRAINER_STATE).unlink()
    (path / layout.TRAINER_STATE).symlink_to(tmp_path / "secret.json")
    checkpoint = layout.as_checkpoint(path)
    assert checkpoint is not None
    with pytest.raises(InputError, match=r"'trainer_state\.json' is not in the checkpoint"):
        checkpoint.trainer_state()
    for name in ("../secret.json", str(tmp_path / "secret.json"), "..", "a/../b"):
        with pytest.raises(InputError, match="nothing outside of it is read"):
            layout.own_file(path, name)
    # The way to the checkpoint may well be a link.
    (tmp_path / "link").symlink_to(path)
    assert layout.own_file(tmp_path / "link", layout.MANIFEST).read_text() == "{}"
    assert os.path.samefile(layout.own_file(tmp_path / "link", layout.MANIFEST), path / layout.MANIFEST)
