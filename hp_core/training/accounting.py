"""What one step counts and adds up: supervised tokens, exact loss weights, and the parts that are logged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hp_core.errors import RunError
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.loss import Reduction, num_targets


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass: what the model and the loss are called with, still on the host.

    `targets` holds this rank's supervised tokens by label tensor, `sample_ids` the rows it is made of.
    """

    model_inputs: dict[str, Any]
    loss_inputs: dict[str, Any]
    targets: Mapping[str, int]
    sample_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> MicroBatch:
        """Count the targets and take `sample_ids`, which no loss needs, out of `loss_inputs`."""
        loss_inputs = dict(loss_inputs)
        sample_ids = loss_inputs.pop("sample_ids", None)
        ids = () if sample_ids is None else tuple(int(i) for i in sample_ids)
        return cls(model_inputs, loss_inputs, num_targets(loss_inputs), ids)


def count_targets(micro_batches: Iterable[MicroBatch], setup: DistributedSetup) -> dict[str, int]:
    """Supervised tokens of the whole step by label tensor: all micro-batches, all ranks, one integer all-reduce."""
    totals: dict[str, int] = {}
    for micro_batch in micro_batches:
        for name, count in micro_batch.targets.items():
            totals[name] = totals.get(name, 0) + count
    names = sorted(totals)
    return dict(zip(names, setup.sum_on_host([totals[name] for name in names]), strict=True))


@dataclass
class StepLoss:
    """Weighs the losses of a step's micro-batches so that their sum is the loss of one whole batch.

    With `n` of the step's `N` supervised tokens in a micro-batch, a mean over its tokens counts `n / N` and a sum
    counts `1 / N`. An entry `x_loss` of a dict is counted by `x_labels` where the batch has them, by `labels`
    otherwise. Without supervised tokens a micro-batch counts exactly zero, whatever its loss returned.
    """

    reduction: Reduction
    totals: Mapping[str, int]
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    per_micro_batch: list[torch.Tensor] = field(default_factory=list)

    def weigh(self, loss: Any, model_output: Any, targets: Mapping[str, int]) -> torch.Tensor:
        """The scalar to call `backward()` on, for what a loss returned for one micro-batch.

        Args:
            loss: a scalar tensor, or a dict of them by name.
            model_output: what the model returned; keeps the graph alive where nothing is to be learnt.
            targets: this micro-batch's supervised tokens by label tensor.
        """
        weighted: torch.Tensor | None = None
        for name, value in loss_entries(loss).items():
            label = label_of(name, self.totals)
            count = targets.get(label, 0)
            # Every rank knows every entry, also where it has nothing to add: the logged vector must line up.
            self.parts.setdefault(name, torch.zeros((), device=value.device))
            if count == 0:
                continue
            part = value * ((count if self.reduction == "mean" else 1) / self.totals[label])
            self.parts[name] = self.parts[name] + part.detach().float()
            weighted = part if weighted is None else weighted + part
        if weighted is None:
            weighted = zero_of(model_output)
            self.per_micro_batch.append(torch.zeros((), device=weighted.device))
        else:
            self.per_micro_batch.append(weighted.detach().float())
        return weighted

    def num_nonfinite(self, device: torch.device) -> torch.Tensor:
        """How many of this rank's micro-batches have a loss that is not finite, as a scalar on the device."""
        if not self.per_micro_batch:
            return torch.zeros((), device=device)
        return (~torch.stack(self.per_micro_batch).isfinite()).sum()


def label_of(entry: str, counts: Mapping[str, int]) -> str:
    """The label tensor that counts the loss entry: `x_labels` for `x_loss` where there is one, else `labels`."""
    own = f"{entry.removesuffix('_loss')}_labels"
    return own if own in counts else "labels"


def loss_entries(loss: Any) -> dict[str, torch.Tensor]:
    """What a loss returned, by entry; a bare tensor is the entry `loss`.

    Raises:
        RunError: something is not a scalar tensor, or there is nothing.
    """
    entries = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise RunError(f"loss_fn: {name!r} must be a scalar tensor, got {shape}")
    if not entries:
        raise RunError("loss_fn: returned an empty dict; it must return a scalar tensor or a dict of them")
    return {name: value.reshape(()) for name, value in entries.items()}


def zero_of(model_output: Any) -> torch.Tensor:
    """An exact zero gradient through everything the model computed, so that every rank joins every collective."""
    if isinstance(model_output, torch.Tensor):
        values: Iterable[Any] = [model_output]
    elif isinstance(model_output, Mapping):
        values = model_output.values()
    else:
        values = model_output
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            # Multiplied before it is summed: the gradient is zero even where the value is not finite.
            return (value * 0.0).sum()
    raise RunError("the model returned no tensor with a gradient; is every parameter frozen?")


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors of a (nested) batch on `device`; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    return value
