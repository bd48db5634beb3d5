"""A plugin that has a run take its steps by turns with other processes; see `tests.benchmarks.turns`."""

from __future__ import annotations

from typing import Any

import torch

from hp_core.hookspecs import hookimpl
from tests.benchmarks.turns import Turn

_turns: list[Turn] = []


@hookimpl
def on_train_start(run: Any) -> None:
    if run.setup.environment.is_main:
        _turns.append(Turn())


@hookimpl
def on_step_end(run: Any, step: int) -> None:
    for turn in _turns:
        if run.setup.device.type == "cuda":
            torch.cuda.synchronize()
        # Another step's is still there where this one was not logged.
        turn.done(run.metrics.get("loss") if run.metrics.get("step") == step else None)


@hookimpl
def on_train_end(run: Any) -> None:
    for turn in _turns:
        turn.end()
