from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hp_core.errors import InputError
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.setups import tiny_setup
from hp_core.training.beside import frozen_model
from hp_core.training.state import random_state


def test_it_is_frozen_and_leaves_the_random_streams_alone() -> None:
    seen: list[DistributedSetup] = []

    def build(setup: DistributedSetup) -> nn.Module:
        seen.append(setup)
        return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    with tiny_setup() as setup:
        torch.manual_seed(1)
        drawn, state = random_state(), torch.get_rng_state()
        first = frozen_model(build, setup, "teacher")
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        state = torch.get_rng_state()
        again = frozen_model(build, setup, "teacher", drawn=drawn)
        assert torch.equal(torch.get_rng_state(), state)
        other = frozen_model(build, setup, "teacher")
    assert not any(one.requires_grad for one in first.parameters())
    assert not any(one.training for one in first.modules())
    assert torch.equal(again[0].weight, first[0].weight)  # type: ignore[index]
    assert not torch.equal(other[0].weight, first[0].weight)  # type: ignore[index]
    assert all((one.replacer, one.planner) == (None, None) for one in seen)
    assert dataclasses.replace(seen[0], replacer=setup.replacer, planner=setup.planner) == setup


def test_what_is_no_model_is_refused_by_the_section_that_asks_for_it() -> None:
    with tiny_setup() as setup, pytest.raises(InputError, match=r"loss_fn\.teacher: .*int"):
        frozen_model(lambda _: 3, setup, "loss_fn.teacher")
