"""Learning-rate schedules as multiples of each group's peak, by optimizer step.

Step `k` counts from 1. Of a warm-up of `W` steps it uses `k / W` of the peak, so the first is never zero and step `W`
is the peak. A decay of `D` steps uses `j / D` of the way down at its step `j`, so its last step uses `min_lr_ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hp_core.errors import ArgumentError

WarmupSteps = Annotated[int, Field(ge=0, description="Steps of the linear rise from 0; 0 starts at the peak.")]
MinLRRatio = Annotated[float, Field(ge=0, le=1, description="Share of the peak that the last step uses.")]


def constant(warmup_steps: WarmupSteps = 0, *, optimizer: Optimizer, train_iters: int) -> LambdaLR:
    """The peak, after the warm-up."""
    del train_iters
    return _schedule(optimizer, lambda step: _warmup(step, warmup_steps))


def linear(
    warmup_steps: WarmupSteps = 0, min_lr_ratio: MinLRRatio = 0.1, *, optimizer: Optimizer, train_iters: int
) -> LambdaLR:
    """A straight line from the peak down to the last step."""
    return _decaying(optimizer, "linear", warmup_steps, train_iters - warmup_steps, train_iters, min_lr_ratio)


def cosine(
    warmup_steps: WarmupSteps = 0, min_lr_ratio: MinLRRatio = 0.1, *, optimizer: Optimizer, train_iters: int
) -> LambdaLR:
    """Half a cosine from the peak down to the last step (Loshchilov and Hutter 2017)."""
    return _decaying(optimizer, "cosine", warmup_steps, train_iters - warmup_steps, train_iters, min_lr_ratio)


def wsd(
    decay_steps: Annotated[int, Field(ge=0, description="Steps of the fall at the end; 0 never falls.")],
    warmup_steps: WarmupSteps = 0,
    min_lr_ratio: MinLRRatio = 0.1,
    decay: Annotated[Literal["linear", "cosine"], Field(description="Shape of the fall.")] = "linear",
    *,
    optimizer: Optimizer,
    train_iters: int,
) -> LambdaLR:
    """Warm-up, stable, decay (Hu et al. 2024): the peak until the last `decay_steps` steps.

    Raises:
        ArgumentError: warm-up and decay together are longer than the run.
    """
    if warmup_steps + decay_steps > train_iters and decay_steps > 0:
        raise ArgumentError(
            "decay_steps",
            f"warmup_steps {warmup_steps} + decay_steps {decay_steps} are more than the run's {train_iters} steps",
        )
    return _decaying(optimizer, decay, warmup_steps, decay_steps, train_iters, min_lr_ratio)


def _decaying(
    optimizer: Optimizer, shape: str, warmup_steps: int, decay_steps: int, train_iters: int, min_lr_ratio: float
) -> LambdaLR:
    first = train_iters - decay_steps

    def factor(step: int) -> float:
        if step <= warmup_steps or step <= first or decay_steps <= 0:
            return _warmup(step, warmup_steps)
        progress = min(1.0, (step - first) / decay_steps)
        height = 1 - progress if shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return min_lr_ratio + (1 - min_lr_ratio) * height

    return _schedule(optimizer, factor)


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


def _schedule(optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    # torch counts from 0 and asks before the first step.
    return LambdaLR(optimizer, lambda index: factor(index + 1))
