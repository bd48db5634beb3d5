"""What a step asks of a loss over its micro-batches, other steps and other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_core.errors import RunError
from hp_core.training.accounting import StepCounts, StepLoss
from hp_core.training.loss import LossContract
from hp_core.training.step import require_same_entries

ALONE: Any = SimpleNamespace(world_size=1)


def step_loss(*names: str) -> StepLoss:
    return StepLoss(LossContract(), StepCounts(), {name: torch.zeros(()) for name in names})


def test_a_step_has_the_entries_of_the_one_before():
    assert require_same_entries(step_loss("b", "a"), (), ALONE) == ("a", "b")
    assert require_same_entries(step_loss("a", "b"), ("a", "b"), ALONE) == ("a", "b")
    with pytest.raises(RunError, match="returned the entries a, and elsewhere a, b; return all of them each time"):
        require_same_entries(step_loss("a"), ("a", "b"), ALONE)
