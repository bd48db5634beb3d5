"""A trainer's state into a checkpoint and out of it again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hp_core.checkpoint.layout import Checkpoint
from hp_core.checkpoint.saver import Contents
from hp_core.checkpoint.store import load_checkpoint, optimizer_names
from hp_core.errors import InputError, Problem
from hp_core.training.plugin_state import plugin_state, restore_plugins
from hp_core.training.protocols import parts_of
from hp_core.training.run import Run
from hp_core.training.schedule import restore_scheduler, scheduler_state


def contents_of(
    run: Run,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    data_fingerprint: str,
) -> Contents:
    """Everything that resuming needs, and the metrics of this very step, by which checkpoints are judged."""
    optimizers = parts_of(optimizer)
    step = run.state.step
    rows = [row for row in (run.metrics, run.evaluation) if row.get("step") == step]
    return Contents(
        step=step,
        model=model,
        loss_fn=loss_fn,
        optimizers=optimizers,
        trainer_state={
            "state": run.state.as_dict(),
            "world_size": run.setup.world_size,
            "data_fingerprint": data_fingerprint,
            "seed": run.config.training.seed,
            "optimizers": optimizer_names(optimizers),
            "lr_scheduler": scheduler_state(lr_scheduler),
            "metrics": {name: value for row in rows for name, value in row.items()},
        },
        manifest=run.manifest,
        plugin_state=plugin_state(run),
    )


def restore(
    run: Run,
    checkpoint: Checkpoint,
    model: nn.Module,
    loss_fn: nn.Module,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    data_fingerprint: str,
) -> None:
    """Put the checkpoint's state in place. Every rank calls it.

    Raises:
        InputError: the data is not what the run was trained on, or the checkpoint doesn't fit.
    """
    state = checkpoint.trainer_state()
    if state["data_fingerprint"] != data_fingerprint:
        raise InputError(
            f"{checkpoint.path}: the training data is not what the run was trained on, so its position in the data "
            "means nothing; start a new run"
        )
    if state["seed"] != run.config.training.seed:
        raise InputError(
            Problem(
                f"{checkpoint.path} was trained with seed {state['seed']}: with another one the rows come in another "
                "order, and its position in them means nothing",
                path="training.seed",
                hint=f"write seed: {state['seed']}, or start a new run",
            )
        )
    restored = load_checkpoint(
        checkpoint,
        model=model,
        loss_fn=loss_fn,
        optimizers=parts_of(optimizer),
        seed=run.config.training.seed,
        setup=run.setup,
    )
    restore_scheduler(lr_scheduler, optimizer, state["lr_scheduler"])
    # Of this very step, for a checkpoint of it that is saved anew.
    run.metrics = dict(state.get("metrics", {}))
    restore_plugins(run, restored.plugin_state, checkpoint.path)
    if restored.new_ranks:
        run.console.say(_told_of(restored.new_ranks, run.setup.world_size))


def _told_of(new_ranks: Sequence[int], world_size: int) -> str:
    """What the user should know of random streams that start anew."""
    if len(new_ranks) == world_size:
        return "the random streams (dropout) of all ranks start anew, everything else goes on"
    listed = ", ".join(map(str, new_ranks))
    return f"the random streams (dropout) of ranks {listed} are new, the others go on; so does everything else"
