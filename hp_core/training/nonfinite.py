"""Finding out, once it is known that a number is not finite, where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hp_core.errors import RunError
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.accounting import MicroBatch, StepLoss
from hp_core.training.gradients import local_part
from hp_core.training.run import Run


@dataclass(frozen=True)
class Fault:
    """A loss that is not finite: its value, and the rank and rows it belongs to."""

    rank: int
    value: float
    sample_ids: tuple[int, ...]

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.sample_ids)) or "unknown"
        return f"loss {self.value} on rank {self.rank} for samples {rows}"


def describe(
    micro_batches: Sequence[MicroBatch],
    step_loss: StepLoss,
    parameters: Iterable[tuple[str, nn.Parameter]],
    setup: DistributedSetup,
) -> str:
    """Say which rank and samples made a loss not finite, or, when every loss is finite, which gradients are not.

    Every rank calls it, and every rank gets the same text. This is the slow path: nothing here runs in a step
    whose numbers are finite.
    """
    # A stage before the last has no losses, and one that a schedule was filled up for has no samples.
    faults = [
        Fault(setup.rank, float(loss), micro_batch.sample_ids)
        for micro_batch, loss in zip(micro_batches, step_loss.per_micro_batch, strict=False)
        if not torch.isfinite(loss)
    ]
    gradients = [
        name for name, p in parameters if p.grad is not None and not bool(torch.isfinite(local_part(p.grad)).all())
    ]
    samples = [i for micro_batch in micro_batches for i in micro_batch.sample_ids]
    everywhere = _gather((faults, gradients, samples), setup)
    all_faults = [fault for faults, _, _ in everywhere for fault in faults]
    if all_faults:
        return "; ".join(str(fault) for fault in all_faults[:3]) + _more(len(all_faults) - 3)
    names = sorted({name for _, names, _ in everywhere for name in names})
    if not names:
        return "the norm of the gradients overflows; each of them is finite"
    ids = sorted({i for _, _, seen in everywhere for i in seen if i >= 0})
    return f"the gradient of {names[0]}{_more(len(names) - 1)}, with finite losses; the step's samples are {ids}"


def on_nonfinite(run: Run, micro_batches: Sequence[MicroBatch], step_loss: StepLoss, model: nn.Module) -> None:
    """Count a step whose numbers are not finite, and end the run or say that the step is skipped, as the recipe wants.

    Raises:
        RunError: the recipe says `stop`, or there were too many in a row.
    """
    training, state = run.config.training, run.state
    text = describe(micro_batches, step_loss, model.named_parameters(), run.setup)
    text = f"step {state.step}: not finite: {text}"
    state.skipped_nonfinite += 1
    state.nonfinite_in_a_row += 1
    if training.nonfinite == "stop":
        raise RunError(f"{text}; training.nonfinite: skip would leave such steps out")
    if state.nonfinite_in_a_row > training.nonfinite_limit:
        raise RunError(f"{text}; that is more than training.nonfinite_limit={training.nonfinite_limit} in a row")
    run.console.say(f"{text}; the step is skipped")


_Account = tuple[list[Fault], list[str], list[int]]


def _gather(value: _Account, setup: DistributedSetup) -> list[_Account]:
    if setup.world_size == 1:
        return [value]
    values: list[_Account] = [value] * setup.world_size
    dist.all_gather_object(values, value, group=setup.host_group)
    return values


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
