"""Metrics files that a killed run keeps, that a resumed run continues, and that any JSON reader reads."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hp_core.observe.trackers import METRICS_FILE, JsonlTracker, read_metrics


def text(run) -> str:
    return (run / METRICS_FILE).read_text()


def write(run, *rows) -> None:
    (run / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "x": np.float64("nan"), "n": 2.5})
    tracker.close()
    assert text(tmp_path) == ('{"step": 1, "loss": null, "grad_norm": null, "lr": null, "x": null, "n": 2.5}\n')


def test_texts_and_numbers_stay_as_they_are(tmp_path):
    row = {"step": 3, "loss": 0.1 + 0.2, "skipped": "no tokens", "grad_norm": None, "ok": True, "name": "ü\u2028\n"}
    tracker = JsonlTracker(tmp_path)
    tracker.log(row)
    tracker.close()
    assert read_metrics(tmp_path) == [row]


def test_a_row_is_in_the_file_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for step in (1, 2):
        tracker.log({"step": step})
        assert read_metrics(tmp_path)[-1] == {"step": step}
    tracker.close()
    assert len(read_metrics(tmp_path)) == 2


def test_a_resumed_run_drops_what_it_goes_back_behind(tmp_path):
    rows = [{"step": 2, "loss": 3.0}, {"step": 4, "loss": 2.0}, {"step": 4, "eval_loss": 1.0}, {"step": 6, "loss": 1.0}]
    write(tmp_path, *rows)
    tracker = JsonlTracker(tmp_path, resume_step=4)
    tracker.log({"step": 5})
    tracker.close()
    assert read_metrics(tmp_path) == [*rows[:3], {"step": 5}]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


@pytest.mark.parametrize("end", ['{"step": 4, "lo', '{"step": 4', "\n", '{"step": 4, "loss": 1}'])
def test_a_last_line_cut_short_harms_nothing_behind_it(tmp_path, end):
    write(tmp_path, {"step": 1}, {"step": 2})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(end)
    assert [row["step"] for row in read_metrics(tmp_path)][:2] == [1, 2]
    tracker = JsonlTracker(tmp_path, resume_step=2)
    tracker.log({"step": 3})
    tracker.close()
    assert text(tmp_path) == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_going_back_to_the_start_drops_everything(tmp_path):
    write(tmp_path, {"step": 1}, {"step": 2})
    JsonlTracker(tmp_path, resume_step=0).close()
    assert text(tmp_path) == ""


def test_resuming_where_no_file_is_starts_one(tmp_path):
    JsonlTracker(tmp_path, resume_step=3).close()
    assert read_metrics(tmp_path) == []
