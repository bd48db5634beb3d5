"""Times and losses of the steps since the last logged one, turned into one row by one collective."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepLoss
from hp_core.training.feeding import source_metrics
from hp_core.training.state import RunState
from hp_core.training.utilization import Utilization


def elapsed(started: float, device: torch.device, *, to_the_end: bool) -> float:
    """The seconds since `started`; with `to_the_end`, when the device has done what it was given.

    What is still to be done when a window of steps ends would be in nobody's time otherwise.
    """
    if to_the_end and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


class Meter:
    """Collects what a logged row needs between two of them."""

    def __init__(self, utilization: Utilization) -> None:
        self.utilization = utilization
        self._begin()

    def _begin(self) -> None:
        self._tokens = 0
        self._flops = 0.0
        self._seconds = 0.0
        self._data_seconds = 0.0
        self._steps = 0

    def add(self, *, tokens: int, computed: Sequence[MicroBatch], seconds: float, data_seconds: float) -> None:
        """Count one step: its supervised tokens over all ranks, and what this rank computed and its times.

        A skipped one has none of both, whatever it computed.
        """
        self._tokens += tokens
        self._flops += self.utilization.own_flops(computed)
        self._seconds += seconds
        self._data_seconds += data_seconds
        self._steps += 1

    def row(
        self,
        state: RunState,
        step_loss: StepLoss,
        *,
        norm: float | None,
        lr: float,
        skipped: str | None,
        tokens: int,
        own: Mapping[str, int],
        setup: DistributedSetup,
    ) -> dict[str, Any]:
        """The metrics of the step just taken, the same on every rank. The next window begins.

        Losses are those of this step alone. Rates and times are means over the window, of the slowest rank.
        A skipped step has no loss to tell: none was optimised. `own` is what this rank counts of the step.
        """
        names = sorted(step_loss.logged)
        counted = [float(number) for number in own.values()]
        logged = [float(step_loss.logged[name]) for name in names]
        rows = setup.gather_on_host([*logged, *counted, self._flops, self._seconds, self._data_seconds])
        losses = {name: sum(row[index] for row in rows) for index, name in enumerate(names)}
        summed = {name: int(sum(row[index] for row in rows)) for index, name in enumerate(own, len(names))}
        seconds = max(row[-2] for row in rows)
        data_seconds = max(row[-1] for row in rows)
        flops = sum(row[-3] for row in rows)
        diagnostics = step_loss.contract.diagnostics
        metrics: dict[str, Any] = {
            "step": state.step,
            "loss": None if skipped else sum(value for name, value in losses.items() if name not in diagnostics),
            "grad_norm": norm,
            "lr": lr,
            "tokens": tokens,
            **summed,
            "total_tokens": state.tokens,
            "tokens_per_second": self._tokens / seconds if seconds else None,
            **self.utilization.metrics(flops, seconds),
            "step_time_s": seconds / self._steps,
            "data_time_s": data_seconds / self._steps,
            "epoch": state.position.epoch,
            "samples": state.position.consumed,
            "skipped_steps": state.skipped_steps,
            **source_metrics(state),
        }
        if skipped:
            metrics["skipped"] = skipped
        else:
            # An entry called `loss` beside others is not the loss that was optimised, which is their sum.
            metrics.update({name: value for name, value in losses.items() if name != "loss"})
        self._begin()
        return metrics
