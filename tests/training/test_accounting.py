"""Loss weights by hand: the values of a step must not depend on how it was cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.errors import RunError
from hp_core.training.accounting import MicroBatch, StepLoss, count_targets, loss_entries, zero_of
from hp_core.training.loss import IGNORE_INDEX, ModelOutputLoss, num_targets, reduction_of

ALONE = SimpleNamespace(sum_on_host=lambda values: values)


def step(losses_and_counts, reduction="mean"):
    step_loss = StepLoss(reduction, {"labels": sum(count for _, count in losses_and_counts)})
    total = sum(
        step_loss.weigh(torch.tensor(loss, requires_grad=True), {}, {"labels": count}).item()
        for loss, count in losses_and_counts
    )
    return total, step_loss


def test_two_batches_of_one_and_nine_tokens():
    # (loss sum, tokens) = (2, 1), (90, 9): 92 / 10, not the mean of means 6.
    total, step_loss = step([(2.0, 1), (10.0, 9)])
    assert total == pytest.approx(9.2)
    assert float(step_loss.parts["loss"]) == pytest.approx(9.2)
    total, _ = step([(2.0, 1), (90.0, 9)], reduction="sum")
    assert total == pytest.approx(9.2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=10).filter(lambda sizes: sum(sizes) <= 10), st.booleans())
def test_any_split_of_ten_rows_gives_the_loss_and_gradient_of_the_whole(sizes, by_sum):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 7, generator=generator, dtype=torch.float64)[: sum(sizes)]
    targets = torch.randint(0, 5, (len(rows),), generator=generator)
    targets[::3] = IGNORE_INDEX
    weight = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    if (targets != IGNORE_INDEX).sum() == 0:
        return
    F.cross_entropy(rows @ weight.T, targets).backward()
    whole, weight.grad = weight.grad, None
    total_targets = int((targets != IGNORE_INDEX).sum())
    step_loss = StepLoss("sum" if by_sum else "mean", {"labels": total_targets})
    for part_rows, part_targets in zip(rows.split(sizes), targets.split(sizes), strict=True):
        logits = part_rows @ weight.T
        loss = F.cross_entropy(logits, part_targets, reduction="sum" if by_sum else "mean")
        count = int((part_targets != IGNORE_INDEX).sum())
        step_loss.weigh(loss, logits, {"labels": count}).backward()
    torch.testing.assert_close(weight.grad, whole, rtol=1e-12, atol=1e-12)


def test_a_micro_batch_without_targets_adds_exactly_nothing():
    weight = torch.ones(3, requires_grad=True)
    logits = weight * torch.tensor([1.0, float("inf"), 2.0])
    step_loss = StepLoss("mean", {"labels": 4})
    step_loss.weigh(torch.tensor(float("nan"), requires_grad=True) * weight.sum(), logits, {"labels": 0}).backward()
    assert step_loss.parts["loss"].item() == 0.0
    # inf * 0 in the chain rule is the model's own business; a finite output gives an exact zero.
    weight.grad = None
    step_loss.weigh(torch.tensor(float("nan")), {"loss": None, "logits": weight * 2}, {"labels": 0}).backward()
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_entries_of_a_dict_are_normalised_by_their_own_labels():
    step_loss = StepLoss("sum", {"labels": 10, "image_labels": 4})
    losses = {"text_loss": torch.tensor(20.0), "image_loss": torch.tensor(2.0)}
    total = step_loss.weigh(losses, {}, {"labels": 10, "image_labels": 4})
    assert total.item() == pytest.approx(20 / 10 + 2 / 4)
    assert {name: part.item() for name, part in step_loss.parts.items()} == {"text_loss": 2.0, "image_loss": 0.5}


def test_targets_are_counted_on_the_labels_as_they_are():
    labels = torch.tensor([[1, 2, 3, 4, IGNORE_INDEX]])
    assert num_targets({"labels": labels, "x_labels": labels[:, :2], "weights": labels}) == {"labels": 4, "x_labels": 2}
    batch = MicroBatch.of({}, {"labels": labels, "sample_ids": torch.tensor([7])})
    assert batch.sample_ids == (7,)
    assert "sample_ids" not in batch.loss_inputs
    assert count_targets([batch, batch], ALONE) == {"labels": 8}


def test_what_is_no_scalar_is_refused():
    with pytest.raises(RunError, match=r"'loss' must be a scalar tensor, got \(2,\)"):
        loss_entries(torch.zeros(2))
    with pytest.raises(RunError, match="'a_loss' must be a scalar tensor, got float"):
        loss_entries({"a_loss": 1.0})
    with pytest.raises(RunError, match="empty dict"):
        loss_entries({})
    with pytest.raises(RunError, match="is every parameter frozen"):
        zero_of([torch.zeros(1)])


def test_reductions():
    assert reduction_of(ModelOutputLoss()) == "mean"
    assert reduction_of(torch.nn.CrossEntropyLoss(reduction="sum")) == "sum"
    assert reduction_of(torch.nn.Linear(1, 1)) == "mean"
    with pytest.raises(ValueError, match="'none'"):
        reduction_of(torch.nn.CrossEntropyLoss(reduction="none"))
