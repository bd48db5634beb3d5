"""The loss protocol as the engine sees it, and the default loss: what the model computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

IGNORE_INDEX = -100

Reduction = Literal["mean", "sum"]


@runtime_checkable
class DeclaresReduction(Protocol):
    """A loss that says how it reduces: `mean` over its supervised tokens (assumed of any other loss) or `sum`."""

    reduction: str


@runtime_checkable
class PreparesModelInputs(Protocol):
    """A loss that changes what the model is called with, every micro-batch."""

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the model."""
        ...


@runtime_checkable
class BindsModel(Protocol):
    """A loss that wants to see the finished model once."""

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Called once, after the model is final."""
        ...


def reduction_of(loss_fn: nn.Module) -> Reduction:
    """How `loss_fn` reduces over tokens.

    Raises:
        ValueError: it declares a reduction the engine can't make exact.
    """
    declared = loss_fn.reduction if isinstance(loss_fn, DeclaresReduction) else "mean"
    if declared == "mean":
        return "mean"
    if declared == "sum":
        return "sum"
    raise ValueError(f"{type(loss_fn).__name__}.reduction is {declared!r}; a loss declares 'mean' or 'sum'")


class ModelOutputLoss(nn.Module):
    """The loss that the model itself returns as `model_output.loss`: a mean over its supervised tokens."""

    reduction = "mean"

    def forward(self, *, model_output: Any, labels: torch.Tensor | None) -> torch.Tensor:
        """Return `model_output.loss`, a scalar.

        Raises:
            ValueError: the model returned no loss.
        """
        del labels
        loss = model_output.loss
        if loss is None:
            raise ValueError("model_output.loss is None: this model computes no loss, so the recipe needs a loss_fn")
        return loss  # type: ignore[no-any-return]


def num_targets(loss_inputs: Mapping[str, Any]) -> dict[str, int]:
    """Supervised tokens of a micro-batch for each label tensor (`labels`, and any `*_labels`), counted on the host."""
    return {
        name: int((value != IGNORE_INDEX).sum())
        for name, value in sorted(loss_inputs.items())
        if (name == "labels" or name.endswith("_labels")) and isinstance(value, torch.Tensor)
    }
