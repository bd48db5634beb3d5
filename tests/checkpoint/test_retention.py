"""What is kept of a run's checkpoints: exactly what the recipe asks for, the newest always among it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hp_core.checkpoint.layout as layout
from hp_core.checkpoint.layout import MANIFEST, METADATA, TRAINER_STATE, step_directory
from hp_core.checkpoint.retention import prune, steps_to_delete
from hp_core.config.checkpoint import CheckpointConfig

VALUES = st.one_of(st.floats(), st.integers(-3, 3), st.none(), st.booleans(), st.just("0.1"))
RECORDED = st.dictionaries(st.integers(0, 60), st.dictionaries(st.sampled_from(["loss", "eval_loss"]), VALUES))


def settings(**values: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"save_every": 1, **values})


def recorded(*steps: int, **losses: float) -> dict[int, dict[str, float]]:
    return {step: {"loss": losses[f"at_{step}"]} if f"at_{step}" in losses else {} for step in steps}


@pytest.mark.parametrize(
    ("values", "deleted"),
    [
        ({}, []),
        ({"keep_last": 1}, [2, 9, 10]),
        ({"keep_last": 2}, [2, 9]),
        ({"keep_last": 9}, []),
        ({"keep_last": 1, "keep_every": 5}, [2, 9]),
        ({"keep_last": 1, "keep_best": {"metric": "loss"}}, [2, 10]),
        ({"keep_last": 1, "keep_best": {"metric": "loss", "mode": "max"}}, [9, 10]),
        ({"keep_last": 1, "keep_best": {"metric": "loss", "count": 2}}, [10]),
        ({"keep_last": 1, "keep_best": {"metric": "other"}}, [2, 9, 10]),
    ],
)
def test_what_goes(values, deleted):
    # As text, 9 would be newer than 10 and 11. Of the three, two have a loss.
    assert steps_to_delete(recorded(11, 9, 2, 10, at_9=0.5, at_2=0.7), settings(**values)) == deleted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, True, "0.1"])
def test_what_is_no_number_is_never_best(value):
    found: Any = {1: {"loss": value}, 2: {"loss": 3.0}, 3: {}}
    for mode in ("min", "max"):
        wanted = settings(keep_last=1, keep_best={"metric": "loss", "mode": mode})
        assert steps_to_delete(found, wanted) == [1]


def test_of_equals_the_newer_is_kept():
    wanted = settings(keep_last=1, keep_best={"metric": "loss"})
    assert steps_to_delete(recorded(1, 2, 3, at_1=0.5, at_2=0.5), wanted) == [1]


@given(RECORDED, st.integers(1, 5), st.none() | st.integers(1, 9), st.integers(1, 3), st.sampled_from(["min", "max"]))
def test_what_is_kept_is_what_is_asked_for(found, keep_last, keep_every, count, mode):
    wanted = settings(
        keep_last=keep_last, keep_every=keep_every, keep_best={"metric": "loss", "mode": mode, "count": count}
    )
    deleted = steps_to_delete(found, wanted)
    kept = set(found) - set(deleted)
    assert deleted == sorted(set(deleted))
    assert set(deleted) <= set(found)
    # The newest are there, those of every so many steps, and none that is better than what was deleted.
    assert set(sorted(found)[-keep_last:]) <= kept
    assert not keep_every or all(step % keep_every for step in deleted)
    values = {
        step: one["loss"]
        for step, one in found.items()
        if type(one.get("loss")) in (int, float) and math.isfinite(one["loss"])
    }
    better = min if mode == "min" else max
    for step in set(deleted) & set(values):
        rivals = [values[other] for other in kept & set(values)]
        assert sum(better(one, values[step]) == one for one in rivals) >= count
    assert len(kept) <= keep_last + count + (len(found) if keep_every else 0)
    # Deciding again about what is left deletes nothing: it doesn't depend on what was there before.
    assert steps_to_delete({step: found[step] for step in kept}, wanted) == []


@given(RECORDED, st.integers(1, 3))
def test_one_after_the_other_is_as_all_at_once(found, keep_last):
    wanted = settings(keep_last=keep_last, keep_best={"metric": "loss", "count": 2})
    there: dict[int, Any] = {}
    for step in sorted(found):
        there[step] = found[step]
        for deleted in steps_to_delete(there, wanted):
            del there[deleted]
    assert set(there) == set(found) - set(steps_to_delete(found, wanted))


# On the disk.


def a_checkpoint(run: Path, step: int, loss: float | None = None) -> Path:
    path = step_directory(run, step)
    path.mkdir(parents=True)
    for name in (METADATA, MANIFEST):
        (path / name).write_text("{}")
    (path / TRAINER_STATE).write_text(json.dumps({"metrics": {} if loss is None else {"loss": loss}}))
    return path


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_incomplete_ones_neither_count_nor_go(tmp_path):
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)
    (step_directory(tmp_path, 3) / METADATA).unlink()
    step_directory(tmp_path, 4).with_name("step_00000004.tmp").mkdir()
    assert prune(tmp_path, settings(keep_last=1)) == []
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000004.tmp"]


def test_what_can_t_be_read_stays_and_is_told(tmp_path):
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)
    (step_directory(tmp_path, 1) / TRAINER_STATE).write_text("{")
    (problem,) = prune(tmp_path, settings(keep_last=1))
    assert "step_00000001/trainer_state.json: can't be read as JSON" in problem
    assert names(tmp_path) == ["step_00000001", "step_00000003"]


@pytest.mark.parametrize(
    ("new", "left"),
    [
        ((), ["abandoned_step_00000004", "abandoned_step_00000006", "step_00000002"]),
        ((3,), ["abandoned_step_00000004", "abandoned_step_00000006", "step_00000003"]),
        ((4,), ["abandoned_step_00000006", "step_00000004"]),
        ((4, 10), ["step_00000010"]),
    ],
)
def test_what_was_set_aside_stays_until_the_run_has_come_as_far_again(tmp_path, new, left):
    for step in (2, 4, 6):
        a_checkpoint(tmp_path, step)
    layout.set_aside(tmp_path, after=2)
    assert prune(tmp_path, settings(keep_last=1)) == []
    for step in new:
        a_checkpoint(tmp_path, step)
        assert prune(tmp_path, settings(keep_last=1)) == []
    assert names(tmp_path) == left


def test_what_was_set_aside_stays_without_a_checkpoint_that_can_be_used_or_a_wish(tmp_path):
    for step in (2, 4):
        a_checkpoint(tmp_path, step)
    layout.set_aside(tmp_path, after=2)
    (tmp_path / "checkpoints" / "abandoned_step_x").mkdir()
    a_checkpoint(tmp_path, 5)
    assert prune(tmp_path, settings()) == []
    for name in (TRAINER_STATE, METADATA):
        (step_directory(tmp_path, 5) / name).write_text("{")
        prune(tmp_path, settings(keep_last=1))
        assert names(tmp_path)[:2] == ["abandoned_step_00000004", "abandoned_step_x"]
        (step_directory(tmp_path, 5) / name).unlink()
    a_checkpoint(tmp_path, 7)
    prune(tmp_path, settings(keep_last=1))
    assert names(tmp_path) == ["abandoned_step_x", "step_00000005", "step_00000007"]


def test_a_killed_deletion_leaves_nothing_that_counts(tmp_path, monkeypatch):
    for step in (1, 2):
        a_checkpoint(tmp_path, step)

    def killed(path: Path) -> None:
        (path / METADATA).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(layout.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, settings(keep_last=1))
    monkeypatch.undo()
    assert names(tmp_path) == ["removed_step_00000001", "step_00000002"]
    assert [one.step for one in layout.complete_checkpoints(tmp_path)] == [2]
    assert layout.search(tmp_path).passed_over == ()
    layout.clean(tmp_path)
    assert names(tmp_path) == ["step_00000002"]


def test_a_deletion_that_fails_is_told_and_ends_nothing(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hp_core.checkpoint.retention.remove", refused)
    told = prune(tmp_path, settings(keep_last=1))
    assert told == [f"can't delete {step_directory(tmp_path, step)}: Permission denied" for step in (1, 2)]
