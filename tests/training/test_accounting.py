"""Loss weights by hand: the values of a step must not depend on how it was cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.errors import InputError, RunError
from hp_core.training.accounting import MicroBatch, StepCounts, StepLoss, count_step, loss_entries, zero_of
from hp_core.training.loss import IGNORE_INDEX, LossContract, ModelOutputLoss, contract_of, reduction_of

ALONE = SimpleNamespace(
    sum_on_host=lambda values, of_all: [*values, *of_all], gather_on_host=lambda values: [values], has_last_stage=True
)


def part(reduction="mean", **counts):
    """A micro-batch with so many targets in a row of its own for each label tensor, and its contract."""
    labels = {
        name: torch.where(torch.arange(max(counts.values(), default=0) or 1) < count, 1, IGNORE_INDEX)[None]
        for name, count in counts.items()
    }
    return MicroBatch.of({}, labels, LossContract(reduction))


def step(losses_and_counts, reduction="mean"):
    parts = [part(reduction, labels=count) for _, count in losses_and_counts]
    contract = LossContract(reduction)
    step_loss = StepLoss(contract, count_step(parts, contract, ALONE))
    total = sum(
        step_loss.weigh(torch.tensor(loss, requires_grad=True), {}, one).item()
        for (loss, _), one in zip(losses_and_counts, parts, strict=True)
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
    reduction = "sum" if by_sum else "mean"
    step_loss = StepLoss(LossContract(reduction), StepCounts({"labels": total_targets}, {"labels": total_targets}))
    for part_rows, part_targets in zip(rows.split(sizes), targets.split(sizes), strict=True):
        logits = part_rows @ weight.T
        loss = F.cross_entropy(logits, part_targets, reduction=reduction)
        one = MicroBatch.of({}, {"labels": part_targets[:, None]}, LossContract(reduction))
        step_loss.weigh(loss, logits, one).backward()
    torch.testing.assert_close(weight.grad, whole, rtol=1e-12, atol=1e-12)


def test_a_micro_batch_without_targets_adds_exactly_nothing():
    weight = torch.ones(3, requires_grad=True)
    logits = weight * torch.tensor([1.0, float("inf"), 2.0])
    step_loss = StepLoss(LossContract(), StepCounts({"labels": 4}, {"labels": 4.0}))
    nothing = part(labels=0)
    step_loss.weigh(torch.tensor(float("nan"), requires_grad=True) * weight.sum(), logits, nothing).backward()
    assert step_loss.parts["loss"].item() == 0.0
    # inf * 0 in the chain rule is the model's own business; a finite output gives an exact zero.
    weight.grad = None
    step_loss.weigh(torch.tensor(float("nan")), {"loss": None, "logits": weight * 2}, nothing).backward()
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_entries_of_a_dict_are_normalised_by_their_own_labels():
    one = part("sum", labels=10, image_labels=4)
    step_loss = StepLoss(LossContract("sum"), count_step([one], LossContract("sum"), ALONE))
    losses = {"text_loss": torch.tensor(20.0), "image_loss": torch.tensor(2.0)}
    total = step_loss.weigh(losses, {}, one)
    assert total.item() == pytest.approx(20 / 10 + 2 / 4)
    assert {name: part.item() for name, part in step_loss.parts.items()} == {"text_loss": 2.0, "image_loss": 0.5}


def test_targets_are_counted_on_the_labels_as_they_are():
    labels = torch.tensor([[1, 2, 3, 4, IGNORE_INDEX]])
    batch = MicroBatch.of({}, {"labels": labels, "x_labels": labels[:, :2], "weights": labels})
    assert batch.targets == {"labels": 4, "x_labels": 2}
    batch = MicroBatch.of({}, {"labels": labels, "sample_ids": torch.tensor([7])})
    assert batch.sample_ids == (7,)
    assert "sample_ids" not in batch.loss_inputs
    counts = count_step([batch, batch], LossContract(), ALONE)
    assert counts == StepCounts({"labels": 8}, {"labels": 8.0}, real_tokens=10)


def test_what_is_no_scalar_is_refused():
    one, contract = part(labels=1), LossContract()
    with pytest.raises(RunError, match=r"'loss' must be a scalar tensor, got \(2,\)"):
        loss_entries(torch.zeros(2), contract, one)
    with pytest.raises(RunError, match="'a_loss' must be a scalar tensor, got float"):
        loss_entries({"a_loss": 1.0}, contract, one)
    with pytest.raises(RunError, match="empty dict"):
        loss_entries({}, contract, one)
    with pytest.raises(RunError, match="only diagnostics"):
        loss_entries({"accuracy": torch.zeros(())}, LossContract(diagnostics=("accuracy",)), one)
    with pytest.raises(RunError, match=r"a value for each of the 1 rows.*got \(2,\)"):
        loss_entries(torch.zeros(2), LossContract("sample"), one)
    with pytest.raises(RunError, match="the entry 'tokens' has the name of another metric; call it something else"):
        loss_entries({"tokens": torch.zeros(())}, contract, one)
    with pytest.raises(RunError, match="the entry 1 has no name"):
        loss_entries({1: torch.zeros(())}, contract, one)
    with pytest.raises(RunError, match="is every parameter frozen"):
        zero_of([torch.zeros(1)])


def test_diagnostics_are_logged_and_not_trained():
    contract = LossContract("mean", diagnostics=("accuracy",))
    parts = [part(labels=1), part(labels=3)]
    step_loss = StepLoss(contract, count_step(parts, contract, ALONE))
    weight = torch.ones((), requires_grad=True)
    for (loss, accuracy), one in zip([(2.0, 1.0), (4.0, 0.0)], parts, strict=True):
        step_loss.weigh({"task_loss": loss * weight, "accuracy": accuracy * weight}, {}, one).backward()
    assert weight.grad.item() == pytest.approx(2 / 4 + 4 * 3 / 4)
    assert {name: value.item() for name, value in step_loss.logged.items()} == {"task_loss": 3.5, "accuracy": 0.25}


def test_values_of_rows_are_averaged_over_the_rows_that_have_a_target():
    contract = LossContract("sample")
    labels = torch.tensor([[1, 1], [1, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX]])
    parts = [MicroBatch.of({}, {"labels": rows}, contract) for rows in (labels, labels[:1])]
    counts = count_step(parts, contract, ALONE)
    assert (counts.amounts, counts.targets) == ({"labels": 3.0}, {"labels": 5})
    step_loss = StepLoss(contract, counts)
    values = torch.tensor([2.0, 4.0, float("nan")], requires_grad=True)
    step_loss.weigh(values, {}, parts[0]).backward()
    step_loss.weigh(torch.tensor([9.0]), {}, parts[1])
    assert step_loss.parts["loss"].item() == pytest.approx(15 / 3)
    assert values.grad.tolist() == pytest.approx([1 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weighted_tokens_are_normalised_by_the_weights_of_the_whole_step(reduction):
    # Token losses 1, 2 | 4 with weights 0.5, 1.5 | 3, and an ignored token that weighs 100.
    contract = LossContract(reduction, ("weights",), "weights")
    labels = [torch.tensor([[1, 1, IGNORE_INDEX]]), torch.tensor([[1]])]
    weights = [torch.tensor([[0.5, 1.5, 100.0]]), torch.tensor([[3.0]])]
    sums = [0.5 * 1 + 1.5 * 2, 3 * 4.0]
    parts = [
        MicroBatch.of({}, {"labels": one, "weights": own}, contract) for one, own in zip(labels, weights, strict=True)
    ]
    counts = count_step(parts, contract, ALONE)
    assert (counts.amounts, counts.targets) == ({"labels": 5.0}, {"labels": 3})
    step_loss = StepLoss(contract, counts)
    for one, summed in zip(parts, sums, strict=True):
        value = summed / one.amounts["labels"] if reduction == "mean" else summed
        step_loss.weigh(torch.tensor(value), {}, one)
    assert step_loss.parts["loss"].item() == pytest.approx(15.5 / 5)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_can_not_be_one_is_refused_with_its_samples(weight):
    batch = {
        "labels": torch.tensor([[1, IGNORE_INDEX]]),
        "w": torch.tensor([[weight, 1.0]]),
        "sample_ids": torch.tensor([7]),
    }
    with pytest.raises(RunError, match=r"samples \[7\]: the weights in the column 'w'"):
        MicroBatch.of({}, batch, LossContract("sum", ("w",), "w"))
    unused = {**batch, "w": torch.tensor([[1.0, weight]])}
    assert MicroBatch.of({}, unused, LossContract("sum", ("w",), "w")).amounts == {"labels": 1.0}


def test_a_step_whose_weights_are_all_zero_is_empty():
    contract = LossContract("sum", ("w",), "w")
    one = MicroBatch.of({}, {"labels": torch.tensor([[1]]), "w": torch.zeros(1, 1)}, contract)
    assert count_step([one], contract, ALONE).is_empty


def test_an_ignore_index_of_its_own_is_left_out_beside_the_general_one():
    labels = torch.tensor([[0, 1, IGNORE_INDEX, 0]])
    assert MicroBatch.of({}, {"labels": labels}, LossContract(ignore_index=0)).targets == {"labels": 1}


def test_padding_and_rows_that_fill_up_are_no_real_tokens():
    labels = torch.ones(3, 2, dtype=torch.int64)
    batch = {"labels": labels, "sample_ids": torch.tensor([4, -1, 5])}
    one = MicroBatch.of({}, batch)
    assert one.real_tokens.tolist() == [[True, True], [False, False], [True, True]]
    is_padding = torch.tensor([[False, True], [True, True], [False, False]])
    one = MicroBatch.of({}, {**batch, "is_padding": is_padding})
    assert one.real_tokens.sum() == 3
    assert "is_padding" not in one.loss_inputs


def test_an_entry_that_nothing_counts_still_reaches_all_outputs():
    """Its head must have a gradient on every rank: FSDP2 adds up the gradients of a unit together."""
    contract = LossContract("sum")
    one = part("sum", labels=2, x_labels=0)
    step_loss = StepLoss(contract, StepCounts({"labels": 2, "x_labels": 4}, {"labels": 2.0, "x_labels": 4.0}))
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    losses = {"loss": first.sum(), "x_loss": second.sum() * float("nan")}
    total = step_loss.weigh(losses, {"logits": first * 1, "more": (second * 1, None)}, one)
    total.backward()
    assert first.grad.tolist() == [0.5, 0.5, 0.5]
    assert second.grad.tolist() == [0.0, 0.0, 0.0]
    assert step_loss.num_counted == 1


def test_terms_of_a_step_are_added_as_they_are():
    contract = LossContract("mean")
    parts = [part(labels=1), part(labels=0)]
    step_loss = StepLoss(contract, count_step(parts, contract, ALONE))
    weight = torch.ones((), requires_grad=True)
    step_loss.weigh(2 * weight, {}, parts[0], {"router_loss": 0.25 * weight}).backward()
    # A micro-batch without targets has its share of what all tokens count for.
    step_loss.weigh(2 * weight, [weight], parts[1], {"router_loss": 0.5 * weight}).backward()
    assert weight.grad.item() == pytest.approx(2 + 0.25 + 0.5)
    assert {name: value.item() for name, value in step_loss.logged.items()} == {"loss": 2.0, "router_loss": 0.75}
    with pytest.raises(RunError, match="'loss' is both an entry of the loss and a term"):
        step_loss.weigh(2 * weight, {}, parts[0], {"loss": weight})


def test_reductions():
    assert reduction_of(ModelOutputLoss()) == "mean"
    assert reduction_of(torch.nn.CrossEntropyLoss(reduction="sum")) == "sum"
    assert reduction_of(torch.nn.Linear(1, 1)) == "mean"
    with pytest.raises(InputError, match="'none'"):
        reduction_of(torch.nn.CrossEntropyLoss(reduction="none"))


def a_loss(forward=lambda *, model_output, labels, **columns: None, **declared):
    loss_fn = torch.nn.Identity()
    loss_fn.forward = forward
    for name, value in declared.items():
        setattr(loss_fn, name, value)
    return loss_fn


def test_a_contract_holds_what_a_loss_declares():
    assert contract_of(torch.nn.Identity()) == LossContract()
    declared = {"reduction": "sum", "columns": ["w"], "weight_column": "w", "ignore_index": 0, "diagnostics": ["z"]}
    assert contract_of(a_loss(**declared)) == LossContract("sum", ("w",), "w", 0, ("z",))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"weight_column": "w"}, r"weight_column is 'w', which is none of its columns \(none\)"),
        ({"columns": ("x_labels",), "weight_column": "x_labels"}, "'x_labels', but `…_labels` are targets"),
        ({"ignore_index": True}, "ignore_index is True, not a whole number"),
        ({"ignore_index": 1.5}, "ignore_index is 1.5"),
        ({"diagnostics": "accuracy"}, "diagnostics is 'accuracy', not a tuple of names"),
        ({"diagnostics": ("a", "a")}, "diagnostics names one twice: a, a"),
        ({"columns": ("is_padding",)}, "'is_padding', which is no column"),
    ],
)
def test_a_contract_that_can_not_be_kept_is_refused(declared, message):
    with pytest.raises(InputError, match=message) as caught:
        contract_of(a_loss(**declared))
    assert caught.value.problems[0].path == "loss_fn"


def test_losses_of_single_tokens_are_reduced_as_declared():
    labels = torch.tensor([[1, 1], [0, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX]])
    values = torch.tensor([[1.0, 3.0], [8.0, float("nan")], [float("nan"), float("inf")]], requires_grad=True)
    weights = {"w": torch.tensor([[1.0, 3.0], [0.5, float("nan")], [9.0, 9.0]])}
    assert LossContract("sum").reduced(values, labels).item() == 12.0
    assert LossContract("mean").reduced(values, labels).item() == 4.0
    assert LossContract("sample").reduced(values, labels).tolist() == [2.0, 8.0, 0.0]
    assert LossContract("sum", ignore_index=0).reduced(values, labels).item() == 4.0
    assert LossContract("sum", ("w",), "w").reduced(values, labels, weights).item() == 1 + 9 + 4
    assert LossContract("mean", ("w",), "w").reduced(values, labels, weights).item() == pytest.approx(14 / 4.5)
    assert LossContract("sample", ("w",), "w").reduced(values, labels, weights).tolist() == [10 / 4, 8.0, 0.0]
    LossContract("mean", ("w",), "w").reduced(values, labels, weights).backward()
    assert values.grad.tolist() == [
        [pytest.approx(1 / 4.5), pytest.approx(3 / 4.5)],
        [pytest.approx(0.5 / 4.5), 0],
        [0, 0],
    ]
    nothing = torch.full_like(labels, IGNORE_INDEX)
    assert LossContract("mean").reduced(values, nothing).item() == 0.0
