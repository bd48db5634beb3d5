from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_core.training.accounting import StepCounts, StepLoss
from hp_core.training.loss import LossContract
from hp_core.training.meter import Meter
from hp_core.training.state import RunState


def computing(flops: float) -> Any:
    """Something that counts as many operations in each step, and hands on what all ranks have counted."""
    return SimpleNamespace(own_flops=lambda computed: flops, metrics=lambda flops, seconds: {"given": (flops, seconds)})


def row(parts: dict[str, float], skipped: str | None = None, flops: float = 0.0) -> dict[str, object]:
    step_loss = StepLoss(
        LossContract(),
        StepCounts({"labels": 4}, {"labels": 4.0}),
        {name: torch.tensor(value) for name, value in parts.items()},
    )
    # The second of two ranks has half of the losses.
    setup = SimpleNamespace(gather_on_host=lambda values: [values, [value / 2 for value in values]])
    meter = Meter(computing(flops))
    meter.add(tokens=4, computed=[], seconds=2.0, data_seconds=0.5)
    return meter.row(RunState(step=1), step_loss, norm=1.0, lr=0.1, skipped=skipped, tokens=4, own={}, setup=setup)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"loss": 2.0}, {"loss": 3.0}),
        ({"a_loss": 2.0, "b_loss": 4.0}, {"loss": 9.0, "a_loss": 3.0, "b_loss": 6.0}),
        ({"loss": 2.0, "z_loss": 4.0}, {"loss": 9.0, "z_loss": 6.0}),
    ],
)
def test_the_loss_is_the_sum_of_the_entries_whatever_they_are_called(parts, expected):
    found = row(parts)
    assert {name: value for name, value in found.items() if name.endswith("loss")} == expected


def test_a_skipped_step_has_no_loss():
    found = row({"a_loss": 2.0}, skipped="no tokens")
    assert found["loss"] is None
    assert found["skipped"] == "no tokens"
    assert "a_loss" not in found


def test_operations_are_summed_over_ranks_and_times_are_of_the_slowest():
    assert row({"loss": 2.0}, flops=6.0)["given"] == (9.0, 2.0)


def test_a_window_begins_where_the_last_one_was_logged():
    setup = SimpleNamespace(gather_on_host=lambda values: [values])
    meter = Meter(computing(6.0))
    step_loss = StepLoss(LossContract(), StepCounts({"labels": 4}, {"labels": 4.0}), {"loss": torch.tensor(1.0)})
    given = {"norm": 1.0, "lr": 0.1, "skipped": None, "tokens": 4, "own": {}, "setup": setup}
    for seconds in (1.0, 2.0):
        meter.add(tokens=4, computed=[], seconds=seconds, data_seconds=0.5)
    assert meter.row(RunState(step=2), step_loss, **given)["given"] == (12.0, 3.0)
    meter.add(tokens=5, computed=[], seconds=4.0, data_seconds=0.5)
    found = meter.row(RunState(step=3), step_loss, **given)
    assert (found["given"], found["tokens_per_second"], found["step_time_s"]) == ((6.0, 4.0), 5 / 4, 4.0)
