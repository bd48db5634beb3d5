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
from hp_core.parallel.agreement import gathered
from hp_core.parallel.fsdp import reshard
from hp_core.parallel.pipeline.runner import members_of
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepCounts, counted_value, label_of, loss_entries
from hp_core.training.loss import LossContract
from hp_core.training.restoring import restored
from hp_core.training.run import Run
from hp_core.training.saving import Checkpointing
from hp_core.training.state import random_state, restore_random_state
from hp_core.training.step import Forward, Passes


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
        InputError: it says `every`, or that `at_end` is true.
    """
    asked = settings.every or settings.at_end
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
    members = [one for module in modules for one in members_of(module)]
    training = [one for one in members if one.training]
    for one in members:
        one.training = False
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

    def counted() -> Iterator[MicroBatch]:
        nonlocal counts
        for micro_batch in micro_batches:
            counts = counts.and_of(micro_batch)
            yield micro_batch

    def add(micro_batch: MicroBatch, found: Forward) -> None:
        if not found.is_whole:
            return
        entries = loss_entries(passes.loss(found.outputs, found.loss_inputs), contract, micro_batch)
        for name, value in entries.items():
            sums.setdefault(name, torch.zeros((), dtype=torch.float64, device=value.device))
            counts_for = counted_value(name, value, contract, micro_batch)
            if counts_for is not None:
                sums[name] += counts_for[0].double() * counts_for[1]

    with evaluating(passes.model, passes.loss_fn), restored(passes.loss_fn, apart_from=passes.model):
        passes.run_forward(counted(), add)
    counts = counts.over_all_ranks(contract, setup)
    names = _names(sums, setup)
    rows = setup.gather_on_host([float(sums.get(name, 0.0)) for name in names])
    losses = {
        name: sum(row[index] for row in rows) / counts.amounts[label_of(name, counts.amounts)]
        for index, name in enumerate(names)
        if counts.amounts[label_of(name, counts.amounts)]
    }
    trained = [value for name, value in losses.items() if name not in contract.diagnostics]
    loss = sum(trained) if trained else None
    return Evaluation(loss, counts.targets.get("labels", 0), losses, time.perf_counter() - started)


def tell(result: Evaluation, run: Run, checkpoints: Checkpointing, split: str) -> None:
    """Log an evaluation, keep it as the one of this step if it is of the validation set, and show it."""
    step = run.state.step
    metrics = result.as_metrics(step, split)
    run.log(metrics)
    if split == "eval":
        run.state.evaluated, run.evaluation = step, metrics
        checkpoints.require_metric(metrics, prefix="eval_")
    loss = "none" if result.loss is None else f"{result.loss:.4f}"
    run.console.say(f"step {step}: {split} loss {loss} over {result.tokens:,} tokens")
    run.plugins.hook.on_evaluate(run=run, evaluation=metrics)


def _names(sums: Iterable[str], setup: DistributedSetup) -> list[str]:
    """The entries of all ranks that have the last stage, which must be the same."""
    by_rank: list[list[str]] = [
        names for names in gathered(sorted(sums) if setup.has_last_stage else None, setup) if names is not None
    ]
    if any(names != by_rank[0] for names in by_rank):
        other = next(names for names in by_rank if names != by_rank[0])
        raise InputError(f"loss_fn: the entries of an evaluation differ between ranks: {by_rank[0]} and {other}")
    return by_rank[0]
