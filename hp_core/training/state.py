"""The only thing that changes during a run, and what resuming needs of it."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
import torch

from hp_core.data.order import Position


@dataclass
class RunState:
    """Counters of a run. `step` counts steps taken, `updates` those that moved the weights.

    `source_rows` and `source_targets` count what was taken of each named source of the data. `cursors` say where each
    data rank stands in streamed data: the numbers of a `Cursor`; brought up to date when a checkpoint is written.
    `evaluated` is the last step that was evaluated: not this one if the run was stopped meanwhile.
    """

    step: int = 0
    updates: int = 0
    tokens: int = 0
    position: Position = field(default_factory=Position)
    skipped_no_tokens: int = 0
    skipped_nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    source_rows: dict[str, int] = field(default_factory=dict)
    source_targets: dict[str, int] = field(default_factory=dict)
    cursors: list[list[int]] = field(default_factory=list)
    evaluated: int = 0

    @property
    def skipped_steps(self) -> int:
        """Steps that moved nothing, for want of tokens or because a number was not finite."""
        return self.skipped_no_tokens + self.skipped_nonfinite

    def as_dict(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """The inverse of `as_dict`."""
        # A checkpoint that doesn't know was written before an evaluation could be interrupted.
        return cls(**{"evaluated": values["step"], **values, "position": Position(**values["position"])})


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed python, numpy and torch for dropout and the like: a stream of its own for each `rank`.

    Parameters don't depend on it; they have streams of their own (`hp_core.model.initialize`).
    """
    words = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def random_state() -> dict[str, Any]:
    """The random streams of this process, in types that `torch.load(weights_only=True)` reads."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(Any, np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
