"""One step of the engine on a tiny model, for a loss under test: what it weighs to, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import BrokenPromiseError, require, whole
from hp_core.testing.models import VOCABULARY, other_text, take_rows, tiny_batch, tiny_model
from hp_core.training.accounting import MicroBatch, StepLoss, count_step, loss_entries
from hp_core.training.columns import column_arguments
from hp_core.training.loss import (
    IGNORE_INDEX,
    BindsModel,
    LossContract,
    PreparesModelInputs,
    contract_of,
)
from hp_core.training.step import Passes, accumulate_gradients

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LossCase:
    """A loss under test: the component with its recipe arguments, and the family of the tiny model."""

    component: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    family: str = "llama"
    tolerance: float = 1e-5

    def build(self) -> nn.Module:
        """The loss, in training mode."""
        loss_fn: object = self.component(**self.arguments)
        if not isinstance(loss_fn, nn.Module):
            text = f"the component built a {type(loss_fn).__name__}; it must build a torch.nn.Module"
            raise BrokenPromiseError(text)
        loss_fn.train()
        return loss_fn

    def bound(self, model: nn.Module, setup: DistributedSetup) -> nn.Module:
        """The loss, after it has seen the model."""
        loss_fn = self.build()
        if isinstance(loss_fn, BindsModel):
            loss_fn.bind_model(model=model, distributed_setup=setup)
        return loss_fn

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, without dropout."""
        model = tiny_model(self.family, dtype=dtype)
        model.eval()
        return model

    def batch(self, *, silent: Sequence[int] = (), seed: int = 0) -> dict[str, torch.Tensor]:
        """Four rows with 12, 7, 2 and 8 targets and the loss's columns; the rows of `silent` are padding.

        Where the loss ignores another label than -100, each row has one of these in the place of its last target.
        """
        batch, contract = tiny_batch(self.family, seed=seed), contract_of(self.build())
        if contract.ignore_index != IGNORE_INDEX:
            batch["labels"] = other_target(batch["labels"], contract)
            batch["labels"][:, -1] = contract.ignore_index
        batch["labels"][list(silent)] = IGNORE_INDEX
        batch["is_padding"] = torch.zeros_like(batch["labels"], dtype=torch.bool)
        batch["is_padding"][list(silent)] = True
        generator = torch.Generator().manual_seed(seed + 1)
        for name in contract.columns:
            if name.endswith("_labels"):
                ids = torch.randint(0, VOCABULARY, batch["labels"].shape, generator=generator)
                batch[name] = torch.where(batch["labels"] == IGNORE_INDEX, IGNORE_INDEX, ids)
            else:
                batch[name] = torch.rand(batch["labels"].shape, generator=generator) + 0.5
        return batch


def other_target(labels: torch.Tensor, contract: LossContract) -> torch.Tensor:
    """Another target in the place of each, which is no label that the loss ignores; labels of -100 stay."""
    others = other_text(labels)
    others = torch.where(others == contract.ignore_index, other_text(others), others)
    return torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, others)


def micro_batches(batch: Batch, count: int, contract: LossContract) -> list[MicroBatch]:
    """The rows of a batch in so many equal parts, as a text trainer hands them on."""
    size = len(batch["input_ids"]) // count
    return [micro_batch(take_rows(batch, index * size, (index + 1) * size), contract) for index in range(count)]


def micro_batch(batch: Batch, contract: LossContract) -> MicroBatch:
    """A batch as one micro-batch: the model gets the labels as well, shifted already."""
    labels, columns = batch["labels"], contract.columns
    for_the_loss = ("labels", "is_padding", *columns)
    model_inputs = {name: value for name, value in batch.items() if name not in for_the_loss}
    loss_inputs = {name: batch[name] for name in for_the_loss if name in batch}
    labels_twice = {"labels": labels, "shift_labels": labels}
    return MicroBatch.of({**model_inputs, **labels_twice, "use_cache": False}, loss_inputs, contract)


def model_inputs_of(loss_fn: nn.Module, one: MicroBatch) -> dict[str, Any]:
    """What the model is called with."""
    if not isinstance(loss_fn, PreparesModelInputs):
        return one.model_inputs
    prepared = loss_fn.prepare_model_inputs(model_inputs=one.model_inputs, loss_inputs=one.loss_inputs)
    require(
        isinstance(prepared, dict),
        f"prepare_model_inputs returned a {type(prepared).__name__}; return the dict that the model is called with",
    )
    return prepared


def call(loss_fn: nn.Module, outputs: Any, loss_inputs: Mapping[str, Any]) -> Any:
    """The loss of one micro-batch, called as the engine does it."""
    columns = column_arguments(loss_inputs, contract_of(loss_fn).columns)
    return loss_fn(model_output=outputs, labels=loss_inputs["labels"], **columns)


def entries_of(loss_fn: nn.Module, outputs: Any, one: MicroBatch) -> dict[str, torch.Tensor]:
    """What the loss gives for a micro-batch, by entry: scalars, or a value for each row."""
    return loss_entries(call(loss_fn, outputs, one.loss_inputs), contract_of(loss_fn), one)


def loss_of(model: nn.Module, loss_fn: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a batch as one micro-batch: a scalar, with its gradient. Values of rows are added up."""
    contract = contract_of(loss_fn)
    one = micro_batch(batch, contract)
    entries = entries_of(loss_fn, model(**model_inputs_of(loss_fn, one)), one)
    trained = [value.sum() for name, value in entries.items() if name not in contract.diagnostics]
    return torch.stack(trained).sum()


@dataclass(frozen=True)
class Step:
    """A step's loss, and the whole gradients by parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def engine_step(model: nn.Module, loss_fn: nn.Module, parts: Sequence[MicroBatch], setup: DistributedSetup) -> Step:
    """Forward and backward over this rank's micro-batches, weighed as the engine does it; gradients start at none."""
    model.zero_grad(set_to_none=True)
    contract = contract_of(loss_fn)
    step_loss = StepLoss(contract, count_step(parts, contract, setup))
    passes = Passes(
        model,
        loss_fn,
        lambda one: (model(**model_inputs_of(loss_fn, one)), one.loss_inputs),
        lambda outputs, loss_inputs: call(loss_fn, outputs, loss_inputs),
    )
    accumulate_gradients(parts, passes, step_loss, setup)
    gradients = {
        name: whole(parameter.grad).detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    losses = setup.gather_on_host([sum(float(value) for value in step_loss.per_micro_batch)])
    return Step(sum(row[0] for row in losses), gradients)
