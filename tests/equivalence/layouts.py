"""One step of a tiny model on any layout of ranks: its loss and every gradient, whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.model.tiny import tiny_config
from hp_core.parallel.context.sequence import own_part
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.checks import whole
from hp_core.testing.ranks import run_ranks
from hp_core.training.accounting import MicroBatch, StepLoss, count_step
from hp_core.training.loss import IGNORE_INDEX, contract_of
from hp_core.training.step import Passes, accumulate_gradients
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.trainers.text import get_batch
from tests.model.tiny import build

NUM_ROWS = 4


def beyond(values: Iterable[Any], *core: Any) -> list[Any]:
    """Parameters of a test, of which all but the core are left to `pytest -m layouts`."""
    return [value if value in core else pytest.param(value, marks=pytest.mark.layouts) for value in values]


# Rows of three packed documents, with targets that differ in number between rows and halves of a row.
DOCUMENTS = (7, 1, 8)


@dataclass(frozen=True)
class Layout:
    """How many ranks there are and how they share the work; `length` is that of the rows."""

    num_ranks: int = 1
    accelerator: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 1
    checkpointing: bool = False


@dataclass(frozen=True)
class Case:
    """What is trained: a family, the length of the rows, the loss, and rows that have no target."""

    family: str = "llama"
    length: int = 16
    loss: Any = CausalLMLoss
    arguments: dict[str, Any] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> dict[str, torch.Tensor]:
        """The whole batch, as a collator gives it."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 90, (NUM_ROWS, self.length), generator=generator)
        labels = torch.randint(0, 90, (NUM_ROWS, self.length), generator=generator)
        pieces = torch.cat([torch.arange(size) for size in DOCUMENTS])
        positions = torch.cat([pieces, torch.arange(max(0, self.length - len(pieces)))])[: self.length]
        labels[:, positions == 0] = IGNORE_INDEX
        for row in range(NUM_ROWS):
            labels[row, : 3 * row] = IGNORE_INDEX
        labels[list(self.silent)] = IGNORE_INDEX
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions.expand(NUM_ROWS, -1).clone(),
            "sample_ids": torch.arange(NUM_ROWS),
        }


@dataclass(frozen=True)
class Found:
    """A step's loss and gradients, the same on every rank."""

    loss: float
    gradients: dict[str, torch.Tensor]


def found_on(case: Case, layout: Layout, timeout: float = 120.0) -> Found:
    """The step of the first rank."""
    found: Found = run_ranks(_step, layout.num_ranks, case, layout, timeout=timeout)[0]
    return found


def _step(environment: ProcessEnvironment, case: Case, layout: Layout) -> Found:
    accelerator, fsdp = AcceleratorConfig(**layout.accelerator), FsdpConfig(**layout.fsdp)
    with tiny_setup(environment, accelerator=accelerator, fsdp=fsdp) as setup:
        model = build(setup, {**tiny_config(case.family), **case.config})
        if layout.checkpointing:
            model.activation_checkpointing_enable()
        loss_fn = case.loss(**case.arguments)
        loss_fn.bind_model(model, setup)
        contract = contract_of(loss_fn)
        share = NUM_ROWS // setup.dp_size
        size = share // layout.num_micro_batches
        micro_batches = []
        for index in range(layout.num_micro_batches):
            first = setup.dp_rank * share + index * size
            rows = {name: value[first : first + size] for name, value in case.batch().items()}
            inputs = get_batch(iter([rows]))
            if setup.sizes.cp > 1:
                inputs = own_part(*inputs, setup)
            micro_batches.append(MicroBatch.of(*inputs, contract))
        step_loss = StepLoss(contract, count_step(micro_batches, contract, setup))

        def forward(one: MicroBatch) -> Any:
            return model(**loss_fn.prepare_model_inputs(one.model_inputs, one.loss_inputs)), one.loss_inputs

        def loss(outputs: Any, loss_inputs: dict[str, Any]) -> Any:
            return loss_fn(model_output=outputs, labels=loss_inputs["labels"])

        accumulate_gradients(micro_batches, Passes(model, loss_fn, forward, loss), step_loss, setup)
        names = sorted(step_loss.logged)
        by_rank = setup.gather_on_host([float(step_loss.logged[name]) for name in names])
        gradients = {
            name: whole(parameter.grad).detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return Found(sum(map(sum, by_rank)), gradients)


def assert_same(
    found: Found, wanted: Found, *, loss: float = 1e-6, absolute: float = 1e-6, relative: float = 1e-5
) -> None:
    """The loss within `loss`; each gradient within `absolute` and, of its largest element, `relative`."""
    assert abs(found.loss - wanted.loss) <= loss, (found.loss, wanted.loss)
    assert set(found.gradients) == set(wanted.gradients)
    for name, gradient in wanted.gradients.items():
        difference = float((found.gradients[name] - gradient).abs().max())
        limit = min(absolute, relative * float(gradient.abs().max()) + 1e-9)
        assert difference <= limit, (name, difference, limit)
