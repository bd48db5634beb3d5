"""What a step asks of a loss over its micro-batches, other steps and other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_core.errors import RunError
from hp_core.training.accounting import StepCounts, StepLoss
from hp_core.training.loss import LossContract
from hp_core.training.step import Entries, require_same_entries

ALONE: Any = SimpleNamespace(world_size=1, axis_rank=lambda axis: 0)


def step_loss(*names: str) -> StepLoss:
    return StepLoss(LossContract(), StepCounts(), {name: torch.zeros(()) for name in names})


def test_a_step_has_the_entries_of_the_one_before():
    known = Entries(("a", "b"), ("a", "b"))
    assert require_same_entries(step_loss("b", "a"), Entries(), ALONE) == known
    assert require_same_entries(step_loss("a", "b"), known, ALONE) == known
    with pytest.raises(RunError, match="returned the entries a, and elsewhere a, b; return all of them each time"):
        require_same_entries(step_loss("a"), known, ALONE)


def test_what_only_other_stages_have_is_zero_here():
    own = step_loss("a")
    assert require_same_entries(own, Entries(("a",), ("a", "b")), ALONE) == Entries(("a",), ("a", "b"))
    assert {name: float(value) for name, value in own.logged.items()} == {"a": 0.0, "b": 0.0}
