"""The end of a step: clip the gradients and move the weights, unless a number is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hp_core.parallel.pipeline.runner import counted_parameters
from hp_core.training.accounting import MicroBatch, StepLoss
from hp_core.training.gradients import clip, norm_and_count
from hp_core.training.nonfinite import on_nonfinite
from hp_core.training.run import Run


def update(
    run: Run,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    micro_batches: Sequence[MicroBatch],
    step_loss: StepLoss,
) -> tuple[float, str | None]:
    """Take an optimizer step; all ranks decide alike whether.

    Returns:
        The norm of all gradients before clipping, and why no weight was moved; None when they were.

    Raises:
        RunError: a loss or a gradient is not finite, and the recipe lets no more such steps be left out.
    """
    model, state = run.model, run.state
    assert model is not None
    num_bad = step_loss.num_nonfinite(run.setup.device)
    norm, num_nonfinite = norm_and_count(counted_parameters(model), num_bad, run.setup)
    skipped: str | None = None
    if num_nonfinite or not math.isfinite(norm):
        on_nonfinite(run, micro_batches, step_loss, model)
        skipped = "not finite"
    else:
        if norm == 0 and state.updates == 0:
            run.console.say(f"step {state.step}: every gradient is 0, so nothing is learnt from it")
        clip([one for one in model.parameters() if one.requires_grad], norm, run.config.training.max_grad_norm)
        optimizer.step()
        lr_scheduler.step()
        state.updates += 1
        state.nonfinite_in_a_row = 0
    optimizer.zero_grad(set_to_none=True)
    return norm, skipped
