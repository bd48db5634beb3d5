"""Micro-batches of one length for a pipeline."""

from __future__ import annotations

import pytest
import torch

from hp_core.training.in_stages import Inputs, of_one_length


def _inputs(length: int) -> Inputs:
    ids = torch.arange(2 * length).reshape(2, length)
    positions = torch.arange(length).repeat(2, 1)
    model_inputs = {"input_ids": ids, "position_ids": positions, "labels": ids, "shift_labels": ids, "use_cache": False}
    return model_inputs, {"labels": ids, "sample_ids": torch.arange(2)}


@pytest.mark.parametrize(
    ("longest", "padded"), [(1, 8), (8, 8), (9, 16), (130, 136), (512, 512), (513, 544), (1000, 1024), (4095, 4096)]
)
def test_lengths_are_rounded_so_that_few_schedules_are_needed(longest: int, padded: int) -> None:
    found = of_one_length([_inputs(longest), _inputs(1)])
    assert [loss_inputs["labels"].shape[1] for _, loss_inputs in found] == [padded, padded]
    assert padded - longest < max(8, longest / 16)


def test_what_is_padded_is_a_document_without_targets() -> None:
    ((model_inputs, loss_inputs),) = of_one_length([_inputs(3)])
    assert model_inputs["input_ids"][1, :3].tolist() == [3, 4, 5]
    assert loss_inputs["labels"][:, 3:].unique().tolist() == [-100]
    assert model_inputs["shift_labels"][0].tolist() == [0, 1, 2] + [-100] * 5
    assert model_inputs["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
