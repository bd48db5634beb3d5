"""What a loss forgot is found on a tiny batch, by its name; what keeps its word passes, and nothing leaves a trace."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core.model.tiny import FAMILIES, tiny_model
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tiny import tiny_setup
from hp_core.plugins import load_plugins
from hp_core.training.defaults import DefaultHooks
from hp_core.training.loss import ModelOutputLoss, contract_of
from hp_core.training.loss_check import Diagnosis, diagnose
from hp_core.training.restoring import restored
from hp_core.training.stand_in import StandIn, diagnosed
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss
from tests.testing import broken_losses as broken
from tests.testing.broken_losses import IGNORED, nll


@pytest.fixture(scope="module")
def setup() -> Iterator[DistributedSetup]:
    with tiny_setup() as one:
        yield one


def found(loss_fn: nn.Module, setup: DistributedSetup, family: str = "llama") -> Diagnosis:
    plugins = load_plugins([], base_dir=Path(), defaults=(DefaultHooks(),))
    return diagnosed(loss_fn, StandIn(family, is_own_family=True), plugins, setup)


class Loss(nn.Module):
    """The loss that a function computes of the costs of the tokens, shape (rows, tokens), and what it declares."""

    def __init__(self, function: Callable[..., Any], **declared: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> Any:
        costs = nll(model_output.logits, labels).view(labels.shape)
        return self.function(costs, labels != IGNORED, *columns.values())


def weighted(how: str, **declared: Any) -> Loss:
    functions: dict[str, Callable[..., Any]] = {
        "sum": lambda costs, _, w: (costs * w).sum(),
        "mean by weights": lambda costs, where, w: (costs * w).sum() / w[where].sum(),
        "mean by number": lambda costs, where, w: (costs * w).sum() / where.sum(),
        "unweighted": lambda costs, where, w: costs.sum() / where.sum(),
    }
    return Loss(functions[how], columns=("w",), **declared)


class TwoEntries(nn.Module):
    """A second head's targets, which lie elsewhere; `divided_by` is whose number the entry is divided by."""

    columns = ("next_labels",)

    def __init__(self, divided_by: str = "next_labels") -> None:
        super().__init__()
        self.divided_by = divided_by

    def forward(self, *, model_output: Any, labels: torch.Tensor, next_labels: torch.Tensor) -> Any:
        given = {"labels": labels, "next_labels": next_labels}
        counted = (given[self.divided_by] != IGNORED).sum()
        main = nll(model_output.logits, labels).sum() / (labels != IGNORED).sum()
        return {"main_loss": main, "next_loss": nll(model_output.logits, next_labels).sum() / counted}


class IgnoresPad(nn.Module):
    """Declares that 0 is no target; `keeps` says whether it is."""

    ignore_index = 0

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        is_target = (labels != IGNORED) & ((labels != 0) | (not self.keeps))
        return (nll(model_output.logits, labels) * is_target.flatten()).sum() / is_target.sum()


class SmallLogits(nn.Module):
    """Never looks at its labels."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        return model_output.logits.square().mean()


def mean(costs: torch.Tensor, where: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return costs.sum() / where.sum()


def with_accuracy(costs: torch.Tensor, where: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": mean(costs, where), "cheap": mean((costs < 4.0) & where, where).detach()}


def lookup(costs: torch.Tensor, where: torch.Tensor, domain: torch.Tensor) -> torch.Tensor:
    return (costs * torch.tensor([1.0, 2.0])[domain]).sum()


BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sum taken for a mean": (
        broken.SumTakenForMean,
        "SumTakenForMean is a sum over the supervised tokens, but declares no reduction (that is 'mean'): rows with 6 "
        "and 3 targets give ",
    ),
    "mean declared a sum": (
        broken.MeanDeclaredSum,
        "MeanDeclaredSum is a mean over the supervised tokens, but declares reduction = 'sum': rows with 6 and 3 ",
    ),
    "mean over all positions": (
        broken.MeanOverPositions,
        "divides by all positions or rows, not by those that have a target, but declares no reduction",
    ),
    "sum over the batch's size": (
        lambda: Loss(lambda costs, where: costs.sum() / len(costs), reduction="sum"),
        "divides by all positions or rows, not by those that have a target, but declares reduction = 'sum'",
    ),
    "mean of rows' sums": (
        lambda: Loss(lambda costs, where: costs.sum() / where.any(1).sum()),
        "divides by the number of rows, not by the supervised tokens",
    ),
    "mean of rows' means": (
        broken.MeanOfRowMeans,
        "averages the tokens of each row first, so that those of short rows count more, but declares no reduction",
    ),
    "mean of all rows' means": (
        lambda: Loss(lambda costs, where: (costs.sum(1) / where.sum(1).clamp(min=1)).mean()),
        "averages the tokens of each row first",
    ),
    "no use of labels": (
        SmallLogits,
        "SmallLogits ignores its labels: it is 0.81089 with any targets, and with fewer of them; compare ",
    ),
    "detached": (broken.Detached, "what Detached returns has no gradient, so nothing would be trained"),
    "a number": (broken.ReturnsNumber, "ReturnsNumber returned a float; return a tensor, or a dict of tensors"),
    "a whole number": (lambda: Loss(lambda costs, where: where.sum()), "returned the dtype torch.int64"),
    "an empty dict": (lambda: Loss(lambda costs, where: {}), "returned an empty dict"),
    "only diagnostics": (
        lambda: Loss(lambda costs, where: {"size": mean(costs, where)}, diagnostics=("size",)),
        "returned only diagnostics",
    ),
    "a value for each token": (
        broken.ReturnsVector,
        "declares reduction = 'sum', a scalar, but returned the shape (24,) for 3 rows of 8 tokens",
    ),
    "a value for each row": (
        lambda: Loss(lambda costs, where: costs.sum(1)),
        "but returned the shape (3,) for 3 rows of 8 tokens; declare reduction = 'sample', or reduce it to a scalar",
    ),
    "a scalar for rows": (
        lambda: Loss(mean, reduction="sample"),
        "declares reduction = 'sample', a value for each row, (3,), but returned the shape ()",
    ),
    "gradient of zero": (
        lambda: Loss(lambda costs, where: mean(costs, where).detach() + 0 * costs.sum()),
        "has a gradient of zero for each of the model's parameters",
    ),
    "undeclared diagnostic": (
        lambda: Loss(with_accuracy),
        "entry 'cheap', has no gradient, but is not declared as a diagnostic; declare diagnostics = ('cheap',)",
    ),
    "unused column": (
        lambda: weighted("unweighted"),
        "declares the column 'w', but other numbers in it change nothing; use it in forward, or don't declare it",
    ),
    "unused label column": (
        lambda: Loss(mean, columns=("next_labels",)),
        "declares the column 'next_labels', but other targets in it change nothing",
    ),
    "unused weights": (
        lambda: weighted("unweighted", weight_column="w"),
        "declares weight_column = 'w', but other weights change nothing; multiply each token's loss by it",
    ),
    "weights that don't normalise": (
        lambda: weighted("mean by number", weight_column="w"),
        "divides by the number of supervised tokens, not by their summed weights 'w', but declares no reduction (that "
        "is 'mean') and weight_column = 'w'",
    ),
    "undeclared weights": (
        lambda: weighted("mean by weights"),
        "divides by the summed column 'w', but declares no reduction (that is 'mean'): ",
    ),
    "weighted mean declared a sum": (
        lambda: weighted("mean by weights", reduction="sum", weight_column="w"),
        "divides by the summed column 'w', but declares reduction = 'sum' and weight_column = 'w'",
    ),
    "weighted sum taken for a mean": (
        lambda: weighted("sum", weight_column="w"),
        "declare reduction = 'sum', or divide by the summed 'w' of the supervised tokens",
    ),
    "another label tensor's number": (
        lambda: TwoEntries("labels"),
        "entry 'next_loss', divides by the number of targets in 'labels', not by those in 'next_labels' that count it",
    ),
    "ignored labels that count": (
        broken.PenalisesEverywhere,
        "counts positions whose label is -100: it is 5.8",
    ),
    "ignore_index that counts": (
        lambda: IgnoresPad(keeps=False),
        "declares ignore_index = 0, but such labels count: ",
    ),
    "an error without targets": (
        broken.RaisesOnNothing,
        "raises where no label is a target: RuntimeError: max()",
    ),
    "labels shifted again": (
        broken.ShiftsAgain,
        "with any target at the first position of a row: it shifts labels that are shifted already",
    ),
    "logits shifted": (broken.ShiftsTheLogits, "pairs labels with the logits of later positions"),
    "the last position": (
        broken.DropsTheLast,
        "with any target at the last position of a row: it leaves that position out",
    ),
}

GOOD: dict[str, Callable[[], nn.Module]] = {
    "sum": broken.SumLoss,
    "mean": broken.MeanLoss,
    "scaled": broken.ScaledModelOutputLoss,
    "parts": broken.WeightedParts,
    "classes": broken.ClassWeighted,
    "remembering": broken.Remembering,
    "nan without targets": lambda: Loss(mean),
    "constant added": lambda: Loss(lambda costs, where: mean(costs, where) + 1),
    "rows": lambda: Loss(lambda costs, where: costs.sum(1) / where.sum(1), reduction="sample"),
    "weighted sum": lambda: weighted("sum", reduction="sum"),
    "sum with weights": lambda: weighted("sum", reduction="sum", weight_column="w"),
    "mean with weights": lambda: weighted("mean by weights", weight_column="w"),
    "mean of weighted": lambda: weighted("mean by number"),
    "diagnostic": lambda: Loss(with_accuracy, diagnostics=("cheap",)),
    "two label tensors": TwoEntries,
    "ignore_index": lambda: IgnoresPad(keeps=True),
    "half precision": lambda: Loss(lambda costs, where: mean(costs, where).bfloat16()),
    "whole numbers": lambda: Loss(lookup, reduction="sum", columns=("domain",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_loss_forgot_is_told_by_its_name(name: str, setup: DistributedSetup) -> None:
    build, fragment = BROKEN[name]
    errors = [str(one) for one in found(build(), setup).errors]
    assert [one for one in errors if fragment in one], errors
    assert len(errors) == 1, errors
    assert errors[0].startswith("loss_fn: ")


@pytest.mark.parametrize("name", GOOD)
def test_a_loss_that_keeps_its_word_passes(name: str, setup: DistributedSetup) -> None:
    assert found(GOOD[name](), setup) == Diagnosis()


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_that_ship_pass_on_each_family(family: str, setup: DistributedSetup) -> None:
    for loss_fn in (ModelOutputLoss(), CausalLMLoss(), CausalLMLoss(0.1, 1e-4), ChunkedCausalLMLoss()):
        assert found(loss_fn, setup, family) == Diagnosis()


class Writes(Loss):
    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> Any:
        labels[labels == 2] = IGNORED
        return super().forward(model_output=model_output, labels=labels, **columns)


def test_a_loss_that_writes_into_its_labels_is_told(setup: DistributedSetup) -> None:
    (error, *_) = found(Writes(lambda costs, _: costs.sum(), reduction="sum"), setup).errors
    assert error.message == "Writes writes into 'labels', which others read, too"


class DividesByNothing(nn.Module):
    """A mean of each row, by a mask: 0 / 0 where a row has no target."""

    reduction = "sample"

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        where = (labels != IGNORED).float()
        log_p = model_output.logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -(log_p * where).sum(1) / where.sum(1)


def test_rows_whose_gradient_is_no_number_are_told(setup: DistributedSetup) -> None:
    (error, *_) = found(DividesByNothing(), setup).errors
    assert "has a gradient that is not finite where a row has no target" in error.message


class Omits(Loss):
    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> Any:
        loss = super().forward(model_output=model_output, labels=labels)
        return {"hard": loss, "easy": loss} if (labels != IGNORED).any() else {"hard": loss}


def test_entries_that_are_not_always_there_are_told(setup: DistributedSetup) -> None:
    errors = found(Omits(lambda costs, _: costs.sum(), reduction="sum"), setup).errors
    assert "Omits returns the entries 'easy' for some batches only" in [one.message for one in errors]


class Tone(nn.Module):
    """Beside the next token a class of two for each position, from the same logits."""

    reduction = "sum"
    columns = ("tone_labels",)

    def forward(self, *, model_output: Any, labels: torch.Tensor, tone_labels: torch.Tensor) -> dict[str, torch.Tensor]:
        tone = nll(model_output.logits[..., :2], tone_labels).sum()
        return {"loss": nll(model_output.logits, labels).sum(), "tone_loss": tone}


def test_labels_of_few_classes_can_be_tried(setup: DistributedSetup) -> None:
    assert found(Tone(), setup) == Diagnosis()


def test_values_of_some_rows_alone_are_told(setup: DistributedSetup) -> None:
    loss = Loss(lambda costs, where: costs.sum(1)[where.any(1)], reduction="sample")
    (error, *_) = found(loss, setup).errors
    assert "returned the shape (1,) for 3 rows, of which 1 have a target" in error.message


@pytest.mark.parametrize(("name", "message"), [("lr", "'lr' has the name of another metric"), (1, "1 has no name")])
def test_names_that_no_entry_can_have_are_told(name: Any, message: str, setup: DistributedSetup) -> None:
    (error, *_) = found(Loss(lambda costs, _: {name: costs.sum()}, reduction="sum"), setup).errors
    assert message in error.message


def test_everything_is_told_at_once(setup: DistributedSetup) -> None:
    def function(costs: torch.Tensor, where: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"main_loss": costs[:, 1:].sum(), "size": costs.sum().detach()}

    errors = [str(one) for one in found(Loss(function, columns=("w",)), setup).errors]
    fragments = ("'size', has no gradient", "the column 'w'", "'main_loss', is a sum", "at the first position")
    assert len(errors) == 5  # the size is a sum as well
    for fragment in fragments:
        assert [one for one in errors if fragment in one], (fragment, errors)


def test_the_numbers_are_those_of_the_loss(setup: DistributedSetup) -> None:
    """They are computed here from the logits, with the groups of targets that the message names."""
    from hp_core.training.loss_rows import TinyRows

    model = StandIn("llama", is_own_family=True).build()
    batch = TinyRows(contract_of(broken.MeanDeclaredSum())).whole()
    with torch.no_grad():
        model.eval()
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    first, others = (
        float(F.cross_entropy(logits[rows].flatten(0, 1), batch["labels"][rows].flatten()))
        for rows in (slice(0, 1), slice(1, 3))
    )
    both = (6 * first + 3 * others) / 9
    (error,) = found(broken.MeanDeclaredSum(), setup).errors
    assert (
        f"rows with 6 and 3 targets give {first:.5g} and {others:.5g}, both together {both:.5g} instead of "
        f"{first + others:.5g}"
    ) in error.message


# What may be right is only remarked on.


@pytest.mark.parametrize(
    ("function", "declared", "fragment"),
    [
        (lambda costs, where: mean(costs, where) ** 2, {}, "is not made of its rows' losses, so it depends on how"),
        (lambda costs, where: mean(costs, where) * float("nan"), {}, "is nan on a tiny batch"),
        (lambda costs, where: mean(costs, where) * 0.0, {}, "is 0 on a tiny batch"),
        (
            lambda costs, where: {"loss": mean(costs, where), "sum": costs.sum().detach()},
            {"diagnostics": ("sum",)},
            "entry 'sum', is a sum over the supervised tokens, so what is logged depends on how a step is cut",
        ),
        (mean, {"diagnostics": ("accuracy",)}, "diagnostics names 'accuracy', which it did not return"),
    ],
)
def test_what_may_be_right_is_a_remark(
    function: Callable[..., Any], declared: dict[str, Any], fragment: str, setup: DistributedSetup
) -> None:
    diagnosis = found(Loss(function, **declared), setup)
    assert not diagnosis.errors
    (warning,) = diagnosis.warnings
    assert fragment in str(warning)


class Entropy(nn.Module):
    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        spread = torch.distributions.Categorical(logits=model_output.logits).entropy()
        return spread[labels != IGNORED].mean()


def test_targets_that_make_no_difference_are_a_remark(setup: DistributedSetup) -> None:
    diagnosis = found(Entropy(), setup)
    assert not diagnosis.errors
    assert "whatever the targets are; only which positions have one makes a difference" in str(diagnosis.warnings[0])


def test_equal_logits_accuse_nobody(setup: DistributedSetup) -> None:
    """While the head is zero every target costs the same, and only how a loss reduces can be told."""
    model = tiny_model("llama")
    nn.init.zeros_(model.lm_head.weight)

    def errors(loss_fn: nn.Module) -> list[str]:
        def run(batch: dict[str, torch.Tensor]) -> tuple[Any, Any]:
            outputs = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
            return loss_fn(model_output=outputs, labels=batch["labels"]), outputs

        contract = contract_of(loss_fn)
        found = diagnose(loss_fn, model, contract, run, backward=False, tells_targets_apart=False)
        return [one.message for one in found.errors]

    assert errors(broken.MeanLoss()) == errors(broken.SumLoss()) == []
    assert "is a sum" in errors(broken.SumTakenForMean())[0]
    assert "divides by all positions" in errors(broken.MeanOverPositions())[0]


# No trace is left.


class Remembers(broken.SumLoss):
    """Everything that a loss may remember things in; each call changes all of it, in evaluation mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.items, self.places, self.recent = 0, [1], {"a": {2}}, deque([3], maxlen=2)
        self.torch_stream = torch.Generator().manual_seed(1)
        self.python_stream, self.numpy_stream = random.Random(1), np.random.default_rng(1)
        self.inner = nn.Module()
        self.inner.last = None

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> Any:
        self.calls += 1
        self.number += 1
        self.items.append(self.number)
        self.places["a"].add(self.number)
        self.recent.append(self.number)
        self.inner.last = labels
        self.new = self.drawn()
        self.train(not self.training)
        return super().forward(model_output=model_output, labels=labels) * self.number

    def drawn(self) -> tuple[Any, ...]:
        return (torch.rand((), generator=self.torch_stream), self.python_stream.random(), self.numpy_stream.random())


def test_a_loss_that_remembers_is_as_before(setup: DistributedSetup) -> None:
    loss_fn, fresh = Remembers(), Remembers()
    items, calls = loss_fn.items, loss_fn.calls
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    # Each call is the first: the factor that it remembers would make it no sum.
    assert found(loss_fn, setup) == Diagnosis()
    after = (random.random(), np.random.random(), float(torch.rand(())))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert after == (random.random(), np.random.random(), float(torch.rand(())))
    assert loss_fn.items is items
    assert loss_fn.calls is calls
    assert float(calls) == loss_fn.number == 0
    assert (loss_fn.items, loss_fn.places, list(loss_fn.recent)) == ([1], {"a": {2}}, [3])
    assert loss_fn.inner.last is None
    assert vars(loss_fn).keys() == vars(fresh).keys()
    assert loss_fn.training
    assert loss_fn.drawn() == fresh.drawn()


def test_the_model_that_a_loss_holds_is_left_alone() -> None:
    """And so are parameters, which a model with sharded weights swaps for others while it is called."""
    loss_fn, model, teacher = nn.Module(), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    loss_fn.model, loss_fn.teacher = model, teacher
    gathered = nn.Parameter(torch.zeros(2))
    with restored(loss_fn, apart_from=model):
        model.running_var.zero_()
        teacher.running_var.zero_()
        teacher.weight = gathered
    assert not model.running_var.any()
    assert teacher.running_var.all()
    assert teacher.weight is gathered
