"""Layers whose activations wait on the host, on every layout, against one process that keeps everything."""

import dataclasses

import pytest
import torch

from hp_core.config.models import MixedPrecisionConfig
from hp_core.model.activation_swap import swap_of
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.ranks import run_ranks
from tests.equivalence.layouts import WITH_FAMILIES, Layout, Trial, assert_same, found_on
from tests.equivalence.test_activation_checkpoint import LAYOUTS as OF_CHECKPOINTS
from tests.equivalence.test_activation_checkpoint import alone, case

# FSDP2 gathers the experts inside a layer's forward in the last.
LAYOUTS = {**OF_CHECKPOINTS, "fsdp2 x ep2": Layout(4, {"ep_size": 2})}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mode", ["off", "full"])
def test_gradients_are_those_of_one_process(name: str, mode: str) -> None:
    swapped = dataclasses.replace(LAYOUTS[name], checkpointing=mode, swapping=True)
    assert_same(found_on(case(), swapped), alone())


@pytest.mark.parametrize("mode", ["off", "full", "selective"])
def test_on_one_process_they_are_the_same_to_the_last_bit(mode: str) -> None:
    found = found_on(case(), Layout(checkpointing=mode, swapping=True))
    assert found.loss == alone().loss
    assert all(torch.equal(found.gradients[name], one) for name, one in alone().gradients.items())


def bytes_on_host(environment: ProcessEnvironment, param_dtype: str | None) -> int:
    """What swapping holds of the whole batch's forward pass on one rank."""
    with tiny_setup(environment, precision=MixedPrecisionConfig(param_dtype=param_dtype)) as setup:
        trial = Trial(setup, case(), Layout(swapping=True))
        batch = trial.case.batch()
        loss = trial.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.sum()
        held = swap_of(trial.model)
        assert held is not None
        found = held.host_bytes
        loss.backward()
        assert held.host_bytes == 0
        return found


@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])
def test_parameters_that_fsdp_gathers_stay_where_they_are(param_dtype: str | None) -> None:
    (one,) = run_ranks(bytes_on_host, 1, param_dtype, preload=WITH_FAMILIES)
    assert run_ranks(bytes_on_host, 2, param_dtype, preload=WITH_FAMILIES) == [one, one]
    assert one > 0
