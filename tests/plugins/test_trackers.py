"""TensorBoard files hold what was logged."""

from __future__ import annotations

import math
import sys

import pytest

from hp_core.errors import ArgumentError
from hp_plugins.trackers.tensorboard import TensorBoardTracker

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(directory) -> dict[str, list[tuple[int, float]]]:
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_number_is_a_scalar_at_its_step(tmp_path):
    tracker = TensorBoardTracker(run_dir=tmp_path)
    tracker.log({"step": 2, "loss": 2.5, "tokens": 64, "skipped": None})
    tracker.log({"step": 4, "loss": None, "tokens": 0, "skipped": "no tokens", "finite": False})
    # Flushed at once, also before the file is closed.
    expected = {"loss": [(2, 2.5)], "tokens": [(2, 64.0), (4, 0.0)]}
    assert read(tmp_path / "tensorboard") == expected
    tracker.close()
    assert read(tmp_path / "tensorboard") == expected


def test_a_number_that_is_not_finite_is_shown_as_such(tmp_path):
    tracker = TensorBoardTracker(run_dir=tmp_path)
    tracker.log({"step": 1, "loss": math.nan})
    tracker.close()
    ((step, value),) = read(tmp_path / "tensorboard")["loss"]
    assert step == 1
    assert math.isnan(value)


def test_the_folder_can_be_named(tmp_path):
    TensorBoardTracker("events", run_dir=tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["events"]


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ArgumentError, match=r"tensorboard is not installed; pip install 'hyperparallel\[tensorboard\]'"
    ):
        TensorBoardTracker(run_dir=tmp_path)
