"""A micro-batch whose loss is computed within the model's head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hp_core.errors import RunError
from hp_plugins.losses.targets import Supervision, Targets

# Of hidden states (tokens, features), the head and the targets: what the gradient flows through, and the sums.
Compute = Callable[[torch.Tensor, nn.Linear, Targets], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class HeadCall:
    """A micro-batch on its way through the model; the head fills in what it found."""

    supervision: Supervision
    labels: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    compute: Compute
    sums: torch.Tensor | None = field(default=None, init=False)

    def answer(self, hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
        """Compute the loss in the head's call and return what its gradient flows through.

        Raises:
            RunError: the head sees other positions than the labels have.
        """
        if hidden.shape[:-1] != self.labels.shape:
            raise RunError(
                f"loss_fn: the head is called for {tuple(hidden.shape[:-1])} tokens, the labels are for "
                f"{tuple(self.labels.shape)}; logits_to_keep must keep them all"
            )
        targets = self.supervision.targets(self.labels, self.columns, head.out_features)
        carrier, self.sums = self.compute(hidden.flatten(0, -2), head, targets)
        return carrier


def answered(call: HeadCall | None, labels: torch.Tensor, hint: str) -> torch.Tensor:
    """The sums that the head found.

    Args:
        call: what `prepare_model_inputs` made, if it was called.
        labels: those that `forward` is given.
        hint: what to do where the model doesn't call its head.

    Raises:
        RunError: the labels are others, or the model did not call its head.
    """
    if call is None:
        raise RunError("loss_fn: prepare_model_inputs was not called before the model")
    if call.sums is None:
        raise RunError(f"loss_fn: the model did not call its head; {hint}")
    if call.labels is not labels and not torch.equal(call.labels, labels):
        raise RunError("loss_fn: the labels are not those that prepare_model_inputs was called with last")
    return call.sums
