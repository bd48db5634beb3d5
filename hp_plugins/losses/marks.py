"""What losses say about themselves to losses around them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class WithholdsLogits(Protocol):
    """A loss that computes within the model's head, so that the model returns no logits for others to look at."""

    withholds_logits: bool


def withholds_logits(loss_fn: nn.Module) -> bool:
    """Whether the loss, or one that it is made of, leaves no logits."""
    return any(isinstance(one, WithholdsLogits) and one.withholds_logits for one in loss_fn.modules())
