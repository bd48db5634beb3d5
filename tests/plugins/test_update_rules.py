"""One or two updates of AdamW and SGD by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_core.errors import ArgumentError
from hp_plugins.optimizers.adamw import AdamW
from hp_plugins.optimizers.sgd import SGD


def a_matrix(value: float, gradient: float) -> nn.Module:
    model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, value)
    model.weight.grad = torch.full_like(model.weight, gradient)
    return model


def test_adamw_by_hand():
    model = a_matrix(1.0, 0.5)
    AdamW(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, model=model).get_optimizer().step()
    # Decay first; the bias-corrected moments of a first step are g and g^2.
    assert model.weight[0, 0].item() == pytest.approx(0.99 - 0.1 * 0.5 / (0.5 + 1e-8), abs=1e-12)


def test_sgd_by_hand():
    model = a_matrix(1.0, 0.5)
    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=0.2, model=model).get_optimizer()
    optimizer.step()
    first = 1 - 0.1 * (0.5 + 0.2)
    assert model.weight[0, 0].item() == pytest.approx(first, abs=1e-12)
    optimizer.step()
    second = first - 0.1 * (0.9 * 0.7 + 0.5 + 0.2 * first)
    assert model.weight[0, 0].item() == pytest.approx(second, abs=1e-12)


def test_sgd_looks_ahead_along_its_momentum():
    model = a_matrix(1.0, 0.5)
    SGD(lr=0.1, momentum=0.9, nesterov=True, model=model).get_optimizer().step()
    assert model.weight[0, 0].item() == pytest.approx(1 - 0.1 * (0.5 + 0.9 * 0.5), abs=1e-12)
    with pytest.raises(ArgumentError, match="nesterov: there is no momentum"):
        SGD(lr=0.1, nesterov=True, model=model)
