"""The scaled loss, and the promises of every loss."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hp_core.testing import loss_checks
from hp_scaled_loss.losses import ScaledModelOutputLoss


@loss_checks(ScaledModelOutputLoss, scale=0.5)
def test_the_promises_of_a_loss(check):
    check()


def test_it_scales_value_and_gradient():
    x = torch.tensor(3.0, requires_grad=True)
    scaled = ScaledModelOutputLoss(scale=0.5)(model_output=SimpleNamespace(loss=x**2), labels=None)
    scaled.backward()
    assert scaled.item() == 4.5
    assert x.grad.item() == 3.0


def test_it_is_the_model_s_loss_by_default():
    loss = torch.tensor(3.0)
    assert ScaledModelOutputLoss()(model_output=SimpleNamespace(loss=loss), labels=torch.zeros(1)).item() == 3.0
