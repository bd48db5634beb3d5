"""Evaluation over a whole data set: token-weighted, whatever the ranks and batch size, leaving no trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_core.config.models import EvaluationConfig
from hp_core.data.protocols import Datasets
from hp_core.errors import InputError, Problem
from hp_core.parallel.fsdp import reshard
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, label_of, loss_entries
from hp_core.training.loss import Reduction
from hp_core.training.state import random_state, restore_random_state


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
    modules: Sequence[nn.Module],
    micro_batches: Iterable[MicroBatch],
    loss_of: Callable[[MicroBatch], Any],
    reduction: Reduction,
    setup: DistributedSetup,
) -> Evaluation:
    """Add up `loss_of` over this rank's micro-batches and over all ranks, by token.

    Every rank must bring the same number of micro-batches; those without targets count nothing. Sums run in
    float64.
    """
    started = time.perf_counter()
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    with evaluating(*modules):
        for micro_batch in micro_batches:
            entries = loss_entries(loss_of(micro_batch))
            for label, count in micro_batch.targets.items():
                counts[label] = counts.get(label, 0) + count
            for name, value in entries.items():
                count = micro_batch.targets.get(label_of(name, micro_batch.targets), 0)
                sums.setdefault(name, torch.zeros((), dtype=torch.float64, device=value.device))
                if count:
                    sums[name] += value.double() * (count if reduction == "mean" else 1)
    names, labels = sorted(sums), sorted(counts)
    rows = setup.gather_on_host([float(sums[name]) for name in names])
    totals = dict(zip(labels, setup.sum_on_host([counts[label] for label in labels]), strict=True))
    losses = {
        name: sum(row[index] for row in rows) / totals[label_of(name, totals)]
        for index, name in enumerate(names)
        if totals[label_of(name, totals)]
    }
    loss = sum(losses.values()) if losses else None
    return Evaluation(loss, totals.get("labels", 0), losses, time.perf_counter() - started)
