"""A plugin that counts the collectives of each step, by the operator that carries them out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from hp_core.hookspecs import hookimpl

RESULTS = "collectives.json"


class Collectives(TorchDispatchMode):
    """Counts what goes through torch's process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.steps: list[dict[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.count[func.name().partition("::")[2].strip("_")] += 1
        return func(*args, **(kwargs or {}))


_watching = Collectives()


@hookimpl
def on_train_start(run: Any) -> None:
    _watching.__enter__()


@hookimpl
def on_step_end(run: Any, step: int) -> None:
    _watching.steps.append(dict(_watching.count))
    _watching.count.clear()


@hookimpl
def on_train_end(run: Any) -> None:
    _watching.__exit__(None, None, None)
    if run.setup.environment.is_main:
        (run.directory.path / RESULTS).write_text(json.dumps(_watching.steps))
