"""Evaluation over a whole data set: token-weighted, whatever the ranks and batch size, leaving no trace."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_core.config.models import EvaluationConfig
from hp_core.data.protocols import Datasets
from hp_core.errors import InputError, Problem
from hp_core.parallel.agreement import require_same_everywhere
from hp_core.parallel.fsdp import reshard
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepCounts, counted_value, label_of, loss_entries
from hp_core.training.loss import LossContract
from hp_core.training.restoring import restored
from hp_core.training.state import random_state, restore_random_state
from hp_core.training.step import Passes


@dataclass(frozen=True)
class Evaluation:
    """The loss over `tokens` supervised tokens; `losses` holds the entries of a dict loss."""

    loss: float | None
    tokens: int
    losses: dict[str, float]
    seconds: float

    def as_metrics(self, step: int, split: str = "eval") -> dict[str, Any]:
        """The row for the trackers; `split` is `eval` or `test`."""
        named = {f"{split}_{name}": value for name, value in self.losses.items() if name != "loss"}
        return {
            "step": step,
            f"{split}_loss": self.loss,
            f"{split}_tokens": self.tokens,
            f"{split}_time_s": self.seconds,
            **named,
        }


def require_validation(settings: EvaluationConfig, datasets: Datasets) -> None:
    """Refuse a recipe that asks for evaluations of data that has no validation split.

    Raises:
        InputError: it says `every`, or `at_end` in so many words.
    """
    asked = settings.every or ("at_end" in settings.model_fields_set and settings.at_end)
    if asked and datasets.validation is None:
        raise InputError(
            Problem(
                "there is nothing to evaluate on: the dataset has no validation split",
                path="evaluation",
                hint="set dataset.validation_fraction, or leave evaluation out",
            )
        )


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, random streams and shards are as before afterwards."""
    random = random_state()
    training = [one for module in modules for one in module.modules() if one.training]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            reshard(module)
        for one in training:
            one.training = True
        restore_random_state(random)


def evaluate(
    micro_batches: Iterable[MicroBatch], passes: Passes, contract: LossContract, setup: DistributedSetup
) -> Evaluation:
    """Add up the loss over this rank's micro-batches and over all ranks, by token (or weight, or row).

    Every rank must bring the same number of micro-batches; those without targets count nothing. Sums run in
    float64. Terms that depend on a whole training step are no part of it.
    """
    started = time.perf_counter()
    sums: dict[str, torch.Tensor] = {}
    counts = StepCounts()
    with evaluating(passes.model, passes.loss_fn), restored(passes.loss_fn, apart_from=passes.model):
        for micro_batch in micro_batches:
            entries = loss_entries(passes.loss(*passes.forward(micro_batch)), contract, micro_batch)
            counts = counts.and_of(micro_batch)
            for name, value in entries.items():
                sums.setdefault(name, torch.zeros((), dtype=torch.float64, device=value.device))
                counted = counted_value(name, value, contract, micro_batch)
                if counted is not None:
                    sums[name] += counted[0].double() * counted[1]
    counts = counts.over_all_ranks(contract, setup)
    names = sorted(sums)
    require_same_everywhere("loss_fn: the entries of an evaluation", names, setup)
    rows = setup.gather_on_host([float(sums[name]) for name in names])
    losses = {
        name: sum(row[index] for row in rows) / counts.amounts[label_of(name, counts.amounts)]
        for index, name in enumerate(names)
        if counts.amounts[label_of(name, counts.amounts)]
    }
    trained = [value for name, value in losses.items() if name not in contract.diagnostics]
    loss = sum(trained) if trained else None
    return Evaluation(loss, counts.targets.get("labels", 0), losses, time.perf_counter() - started)
