"""How long a run is, and where a learning-rate schedule stands after a resume."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hp_core.config.models import TrainingConfig
from hp_core.data.order import GlobalOrder, Position
from hp_core.data.streaming import StreamOrder


def total_steps(order: GlobalOrder | StreamOrder, training: TrainingConfig) -> int:
    """Steps of the whole run: the horizon of its learning-rate schedule."""
    return order.num_steps(iters=training.train_iters, samples=training.train_samples, epochs=training.train_epochs)


def steps_left(order: GlobalOrder, training: TrainingConfig, step: int, position: Position) -> int:
    """Steps still to take for a run that stands after `step` steps at `position`.

    Counted in rows, not steps, where the recipe counts rows or epochs: the batch size may have changed since.
    """
    if training.train_iters is not None:
        return max(0, training.train_iters - step)
    end = order.num_rows * (training.train_epochs or 0) if training.train_samples is None else training.train_samples
    left = max(0, end - position.consumed)
    in_epoch = min(left, order.num_rows - position.offset)
    epochs, rest = divmod(left - in_epoch, order.num_rows)
    per_step = order.rows_per_step
    return -(-in_epoch // per_step) + epochs * -(-order.num_rows // per_step) + -(-rest // per_step)


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """What resuming needs of a scheduler, for JSON."""
    return {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}


def restore_scheduler(scheduler: LRScheduler, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put a scheduler back where it was, and the learning rates with it.

    A schedule that is a function of the step starts from the recipe's learning rates, so that a changed `lr` acts;
    any other continues from the learning rates it had.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch = state["last_epoch"]
        scheduler._step_count = state["_step_count"]
        rates = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = list(rates)
    else:
        scheduler.load_state_dict(state)
        rates = list(state["_last_lr"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
