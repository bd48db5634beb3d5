"""The update rule against numbers worked out by hand, what is decayed, and the promises of every optimizer."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from hp_core.testing import optimizer_checks
from hp_lion.optimizer import Lion, LionOptimizer


@optimizer_checks(Lion, lr=1e-3)
def test_the_promises_of_an_optimizer(check):
    check()


def test_three_steps_worked_out_by_hand():
    weight = nn.Parameter(torch.tensor([[1.0]], dtype=torch.float64))
    optimizer = LionOptimizer([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.2)
    # gradient, its mean with the momentum (0, 0.5, 0.125), the weight, the next momentum
    # 2: sign(1) = 1,      1 * 0.98 - 0.1 = 0.88,          0.75 * 0 + 0.25 * 2 = 0.5
    # -1: sign(-0.25) = -1, 0.88 * 0.98 + 0.1 = 0.9624,     0.75 * 0.5 - 0.25 = 0.125
    # -0.125: sign(0) = 0,  0.9624 * 0.98 = 0.943152
    for gradient, expected in ((2.0, 0.88), (-1.0, 0.9624), (-0.125, 0.943152)):
        weight.grad = torch.tensor([[gradient]], dtype=torch.float64)
        optimizer.step()
        assert weight.item() == pytest.approx(expected, rel=1e-14)


def test_many_steps_against_plain_numbers():
    generator = random.Random(0)
    weights = [generator.gauss(0, 1) for _ in range(5)]
    parameter = nn.Parameter(torch.tensor([weights], dtype=torch.float64))
    optimizer = LionOptimizer([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.3)
    momenta = [0.0] * 5
    for _ in range(20):
        gradients = [generator.gauss(0, 1) for _ in range(5)]
        parameter.grad = torch.tensor([gradients], dtype=torch.float64)
        optimizer.step()
        for index, gradient in enumerate(gradients):
            mean = 0.9 * momenta[index] + 0.1 * gradient
            weights[index] += -0.01 * math.copysign(1, mean) - 0.01 * 0.3 * weights[index]
            momenta[index] = 0.99 * momenta[index] + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), torch.tensor([weights], dtype=torch.float64), rtol=1e-12, atol=0)


class Model(nn.Module):
    """A matrix, a bias, a norm, a stack of biases, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(3)
        self.stacked_bias = nn.Parameter(torch.ones(4, 3))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_zero_gradients_decay_matrices_and_nothing_else():
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Lion(lr=1e-3, weight_decay=0.1, model=model).get_optimizer().step()
    for name, parameter in model.named_parameters():
        expected = before[name] * 0.9999 if name == "linear.weight" else before[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0, msg=name)


def test_a_parameter_without_a_gradient_stays_and_a_closure_is_called():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = LionOptimizer([parameter], lr=0.1, weight_decay=0.5)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.equal(parameter.detach(), torch.ones(2, 2))
    assert not optimizer.state


def test_without_matrices_there_is_one_group():
    groups = Lion(lr=0.1, model=nn.LayerNorm(3)).get_optimizer().param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.0)]
