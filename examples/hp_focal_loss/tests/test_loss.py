"""The numbers of the focal loss, and the promises of every loss."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hp_core.testing import loss_checks
from hp_focal_loss.loss import IGNORED, FocalLoss


@loss_checks(FocalLoss, gamma=2.0)
def test_the_promises_of_a_loss(check):
    check()


def batch(rows: int = 3, tokens: int = 5, vocabulary: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, tokens, vocabulary, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(vocabulary, (rows, tokens), generator=generator)
    labels[0, 2:] = IGNORED
    return logits, labels


def focal(loss: FocalLoss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss(model_output=SimpleNamespace(logits=logits), labels=labels)


def test_values_worked_out_by_hand():
    # Probabilities 1/2 and 3/4 of the target: 0.5^2 * log 2 = 0.173287 and 0.25^2 * log(4/3) = 0.017980.
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0], [9.0, 9.0]]], dtype=torch.float64)
    labels = torch.tensor([[0, 0, IGNORED]])
    assert focal(FocalLoss(), logits, labels).item() == pytest.approx(0.173287 + 0.017980, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_value_and_gradient_of_the_formula(gamma):
    logits, labels = batch()
    logits.requires_grad_()
    loss = focal(FocalLoss(gamma), logits, labels)
    (found,) = torch.autograd.grad(loss, logits)
    expected, slopes = 0.0, torch.zeros_like(logits)
    for row, token in (labels != IGNORED).nonzero().tolist():
        exponentials = [math.exp(value) for value in logits[row, token].tolist()]
        target = int(labels[row, token])
        p = exponentials[target] / sum(exponentials)
        expected -= (1 - p) ** gamma * math.log(p)
        slope = gamma * p * (1 - p) ** (gamma - 1) * math.log(p) - (1 - p) ** gamma
        for index, value in enumerate(exponentials):
            slopes[row, token, index] = slope * ((index == target) - value / sum(exponentials))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found, slopes, rtol=1e-10, atol=1e-12)


def test_without_a_power_it_is_cross_entropy():
    logits, labels = batch()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert focal(FocalLoss(0.0), logits, labels).item() == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_a_certain_token_costs_nothing_and_moves_nothing(gamma):
    logits = torch.tensor([[[200.0, 0.0, -200.0]]], requires_grad=True)
    right = focal(FocalLoss(gamma), logits, torch.tensor([[0]]))
    (slope,) = torch.autograd.grad(right, logits)
    assert right.item() == 0.0
    assert torch.equal(slope, torch.zeros_like(slope))
    wrong = focal(FocalLoss(gamma), logits, torch.tensor([[2]]))
    (slope,) = torch.autograd.grad(wrong, logits)
    assert wrong.item() == 400.0
    assert slope.tolist() == [[[1.0, 0.0, -1.0]]]


def test_the_model_computes_no_loss_of_its_own():
    inputs = {"input_ids": 1, "labels": 2, "shift_labels": 3, "use_cache": False}
    assert FocalLoss().prepare_model_inputs(inputs, {"labels": 2}) == {"input_ids": 1, "use_cache": False}
