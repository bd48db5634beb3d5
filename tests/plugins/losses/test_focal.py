"""The focal loss against its definition, at the ends of its range, and plain cross entropy at a gamma of 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.focal import FocalLoss, modulated
from tests.plugins.losses.plain import a_batch

VOCAB = 97


def some_logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (3 * torch.randn(2, 6, VOCAB, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def value(logits: torch.Tensor, labels: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    loss_inputs = a_batch(VOCAB)[1]
    loss_fn = FocalLoss(**arguments)
    columns = {name: loss_inputs[name] for name in loss_fn.columns}
    labels = loss_inputs["labels"] if labels is None else labels
    return loss_fn(model_output=SimpleNamespace(logits=logits), labels=labels, **columns)


def by_definition(logits: torch.Tensor, gamma: float, ignore_index: int, weighted: bool) -> torch.Tensor:
    """Token by token."""
    loss_inputs = a_batch(VOCAB)[1]
    total = torch.zeros((), dtype=torch.float64)
    rows = zip(
        logits.flatten(0, 1), loss_inputs["labels"].flatten(), loss_inputs["weights"].flatten().double(), strict=True
    )
    for row, label, weight in rows:
        if int(label) in (-100, ignore_index):
            continue
        p = row.exp()[label] / row.exp().sum()
        total = total + -((1 - p) ** gamma) * p.log() * (weight if weighted else 1)
    return total


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_its_definition_with_every_gradient(gamma: float, ignore_index: int, weighted: bool) -> None:
    logits = some_logits()
    wanted = by_definition(logits, gamma, ignore_index, weighted)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    found = value(logits, gamma=gamma, ignore_index=ignore_index, token_weights="weights" if weighted else None)
    (gradient,) = torch.autograd.grad(found, logits)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-12 * float(wanted_gradient.abs().max()))


def test_a_token_by_hand() -> None:
    # p = 1/4: (3/4)^2 * log 4.
    logits = torch.tensor([[[2.0, 1.0, 1.0]]]).log()
    loss = FocalLoss()(model_output=SimpleNamespace(logits=logits), labels=torch.tensor([[1]]))
    assert loss.item() == pytest.approx(0.5625 * 1.3862943611, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, "weights"])
def test_without_gamma_it_is_cross_entropy_bit_for_bit(dtype: torch.dtype, weights: str | None) -> None:
    loss_inputs = a_batch(VOCAB)[1]
    loss_fn = CausalLMLoss(token_weights=weights)
    columns = {name: loss_inputs[name] for name in loss_fn.columns}
    logits = some_logits(dtype)
    wanted = loss_fn(model_output=SimpleNamespace(logits=logits), labels=loss_inputs["labels"], **columns)
    found = value(logits, gamma=0.0, token_weights=weights)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(one, logits)[0] for one in (found, wanted)))


def test_every_option_changes_the_loss() -> None:
    options: list[dict[str, Any]] = [{}, {"gamma": 1.0}, {"ignore_index": 3}, {"token_weights": "weights"}]
    assert len({value(some_logits(), **one).item() for one in options}) == len(options)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 1.0, 2.0])
def test_certain_and_hopeless_tokens_have_finite_gradients(gamma: float) -> None:
    # The first target's p rounds to 1, the second's to 0, the third's is just below 1.
    logits = torch.tensor([[[200.0, 0.0], [200.0, 0.0], [15.0, 0.0]]], requires_grad=True)
    loss = FocalLoss(gamma)(model_output=SimpleNamespace(logits=logits), labels=torch.tensor([[0, 1, 0]]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(200.0, rel=1e-5)
    assert gradient.isfinite().all()
    assert gradient[0, 0].tolist() == [0.0, 0.0]
    assert gradient[0, 1].tolist() == pytest.approx([1.0, -1.0])


def test_the_slope_of_small_losses_is_the_definition_s() -> None:
    # d/dc (1 - exp(-c))^g c = (1 - exp(-c))^g + g (1 - exp(-c))^(g - 1) exp(-c) c, about (1 + g) c^g.
    losses = torch.tensor([1e-30, 1e-12, 1e-4], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(modulated(losses, 0.5).sum(), losses)
    torch.testing.assert_close(slope, 1.5 * losses.detach() ** 0.5, rtol=1e-3, atol=0)


def test_nothing_supervised_gives_exactly_zero() -> None:
    logits = some_logits()
    loss = value(logits, torch.full((2, 6), -100))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0
    assert not gradient.any()


def test_labels_are_kept_from_the_model() -> None:
    inputs = {"input_ids": 1, "position_ids": 2, "labels": 3, "shift_labels": 4, "use_cache": False}
    kept = FocalLoss().prepare_model_inputs(inputs, {"labels": 3})
    assert kept == {"input_ids": 1, "position_ids": 2, "use_cache": False}
