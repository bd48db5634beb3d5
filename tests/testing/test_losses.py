"""Each check of a loss catches a loss that breaks its promise, and lets pass those that keep all."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hp_core.testing import loss_checks
from hp_core.testing.checks import BrokenPromiseError, Check
from hp_core.testing.loss_steps import LossCase
from hp_core.testing.losses import LossChecks
from tests.testing import broken_losses as broken
from tests.testing.caught import failures

ON_RANKS = {"two_ranks", "silent_rank"}


@loss_checks(broken.SumLoss)
def test_a_sum_keeps_every_promise(check: Check) -> None:
    check()


@loss_checks(broken.MeanLoss, family="qwen3_moe")
def test_a_mean_keeps_every_promise(check: Check) -> None:
    check()


@loss_checks(broken.ScaledModelOutputLoss, scale=0.5)
def test_a_scaled_model_loss_keeps_every_promise(check: Check) -> None:
    check()


@loss_checks(broken.WeightedParts)
def test_a_dict_with_a_column_keeps_every_promise(check: Check) -> None:
    check()


@loss_checks(broken.ClassWeighted)
def test_a_loss_with_a_weight_for_each_class_keeps_every_promise(check: Check) -> None:
    check()


@loss_checks(broken.DeclaresEverything)
def test_a_loss_that_declares_everything_keeps_every_promise(check: Check) -> None:
    check()


@loss_checks(broken.DeclaresEverything, reduction="sample")
def test_a_loss_of_rows_keeps_every_promise(check: Check) -> None:
    check()


# The loss, the checks that catch it, and a part of what the first of them says.
CAUGHT = [
    (
        broken.Freezes,
        ["model_hooks"],
        "after bind_model the model: requires_grad of model.embed_tokens.weight is False",
    ),
    (broken.SumTakenForMean, ["token_weighting"], "with 2 micro-batches the loss is"),
    (broken.MeanDeclaredSum, ["token_weighting"], "with 2 micro-batches the loss is"),
    (
        broken.MeanOverPositions,
        ["token_weighting", "ignored_tokens"],
        "divide by the number of labels that aren't -100",
    ),
    (broken.MeanOfRowMeans, ["token_weighting"], "with 2 micro-batches the loss is"),
    (broken.PenalisesEverywhere, ["ignored_tokens", "labels_shifted_once"], "with a row without targets beside others"),
    (broken.RaisesOnNothing, ["ignored_tokens"], "it raises RuntimeError: max()"),
    (
        broken.ShiftsAgain,
        ["labels_shifted_once", "every_target_counts"],
        "another target of the first position gives the same loss",
    ),
    (broken.ShiftsTheLogits, ["labels_shifted_once"], "changes with the tokens after it"),
    (broken.DropsTheLast, ["every_target_counts"], "another target at position"),
    (broken.IgnoresItsColumn, ["every_target_counts"], "another column 'weights' gives the same loss"),
    (broken.DividesByCount, ["token_weighting"], "with 2 micro-batches the loss is"),
    (broken.CountsTheIgnored, ["token_weighting"], "with 2 micro-batches the loss is"),
    (broken.HalfDetached, ["gradients"], "a part of the loss is detached"),
    (broken.WrongBackward, ["gradients"], "the derivative along a direction of"),
    (broken.ClampsInPlace, ["inputs_untouched"], "the loss changes model_output: it writes into 'logits'"),
    (broken.WritesLabels, ["inputs_untouched"], "the loss changes: it writes into 'labels'"),
    (broken.Pops, ["inputs_untouched"], "prepare_model_inputs changes model_inputs: it removes 'labels'"),
    (broken.WritesGradients, ["inputs_untouched"], "after the loss the model: the gradient of lm_head.weight"),
    (broken.Unstorable, ["state"], "can't be stored as tensors and plain values"),
    (broken.CountsEvaluations, ["evaluation"], "an evaluation changes the loss's state: calls is off by up to 1"),
    (broken.NeedsGradients, ["evaluation"], "it raises RuntimeError: element 0 of tensors does not require grad"),
]


@pytest.mark.parametrize(("component", "names", "text"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_caught_by_its_own_check(component: Any, names: list[str], text: str) -> None:
    found = failures(LossChecks(LossCase(component)).checks(), ON_RANKS)
    assert sorted(found) == sorted(names), found
    assert f"{component.__name__} breaks {names[0]!r}" in found[names[0]]
    assert text in found[names[0]]


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (broken.ReturnsNumber, "'loss' must be a scalar tensor, got float"),
        (broken.ReturnsVector, "'loss' must be a scalar tensor, got (48,)"),
        (broken.Detached, "loss has no gradient"),
        (broken.LogsInSecret, "belongs in diagnostics = ('hits',)"),
        (broken.OtherNames, "can't be called with model_output and labels"),
        (broken.OddReduction, "a loss declares 'mean', 'sum' or 'sample'"),
        (broken.WithParameter, "trainable parameter 'weight', which nothing would train"),
        (broken.no_module, "the component built a function; it must build a torch.nn.Module"),
    ],
)
def test_what_is_no_loss_is_caught_by_the_contract(component: Any, text: str) -> None:
    (check,) = [one for one in LossChecks(LossCase(component)).checks() if one.name == "contract"]
    with pytest.raises(BrokenPromiseError, match="breaks 'contract'") as caught:
        check()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (broken.Nudges, "after bind_model the model: lm_head.weight is off by"),
        (broken.AsksForNonsense, "the model can't be called with what prepare_model_inputs returns"),
        (broken.DropsPositions, "prepare_model_inputs drops 'position_ids', which tell packed documents apart"),
        (broken.ReturnsNothing, "prepare_model_inputs returned a NoneType"),
    ],
)
def test_harm_to_the_model_and_its_inputs_is_caught(component: Any, text: str) -> None:
    (check,) = [one for one in LossChecks(LossCase(component)).checks() if one.name == "model_hooks"]
    with pytest.raises(BrokenPromiseError) as caught:
        check()
    assert text in str(caught.value)


def test_what_a_loss_remembers_belongs_into_buffers() -> None:
    """Both weigh micro-batches unlike, which is a fault of its own; only one of them can be resumed."""
    assert set(failures(LossChecks(LossCase(broken.Remembering)).checks(), ON_RANKS)) == {
        "token_weighting",
        "ignored_tokens",
    }
    found = failures(LossChecks(LossCase(broken.RemembersInAttribute)).checks(), ON_RANKS)
    assert set(found) == {"token_weighting", "ignored_tokens", "state"}
    assert "keep what it remembers in buffers" in found["state"]


@pytest.mark.parametrize(
    ("component", "names", "text"),
    [
        (broken.TimesRanks, ["two_ranks", "silent_rank"], "with 1 micro-batch on each of two ranks the loss is"),
        (broken.OtherParametersOnRanks, ["two_ranks", "silent_rank"], "on each of two ranks"),
        (broken.NeedsTargetsOnEveryRank, ["silent_rank"], "rank 1 of 2: RuntimeError: nothing to learn here"),
        (broken.SumTakenForMean, ["token_weighting", "two_ranks"], "with 2 micro-batches the loss is"),
        (functools.partial(broken.ScaledModelOutputLoss, scale=2.0), [], ""),
    ],
)
def test_what_breaks_on_two_ranks_is_caught(component: Any, names: list[str], text: str) -> None:
    found = failures(LossChecks(LossCase(component)).checks())
    assert sorted(found) == sorted(names), found
    assert not names or text in found[names[0]]


def test_a_check_can_be_skipped_for_a_reason_and_by_its_name() -> None:
    mark = loss_checks(broken.HalfDetached, skip={"gradients": "half of it is a constant"}).mark
    skipped = {one.id: one.marks[0].kwargs["reason"] for one in mark.args[1] if one.marks}
    assert skipped == {"gradients": "half of it is a constant"}
    with pytest.raises(ValueError, match=r"skip names 'gradient'; the checks are contract, .*gradients"):
        loss_checks(broken.HalfDetached, skip={"gradient": "half of it is a constant"})


def test_every_check_catches_something() -> None:
    """Those that the other tests above are for, and those that their table names first."""
    first = {names[0] for *_, names, _ in CAUGHT}
    assert first | {"contract", "state", "two_ranks", "silent_rank"} == {
        check.name for check in LossChecks(LossCase(broken.SumLoss)).checks()
    }
