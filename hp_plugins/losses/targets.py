"""Which tokens a loss learns from and how much each counts, and the options that all losses over tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from hp_core.errors import RunError
from hp_core.training.loss import IGNORE_INDEX

LabelSmoothing = Annotated[float, Field(ge=0, lt=1, description="Probability spread over all classes.")]
ZLoss = Annotated[float, Field(ge=0, description="Weight of the squared log-normaliser.")]
IgnoreIndex = Annotated[
    int, Field(ge=-(2**63), lt=2**63, description="Labels of this value are no targets, beside -100.")
]
TokenWeights = Annotated[
    str | None, Field(min_length=1, description="Column that holds the weight of each token's loss.")
]


@dataclass(frozen=True)
class Targets:
    """The tokens of a micro-batch, flat: `labels` are -100 where there is no target, and `weights` are 0 there."""

    labels: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True)
class Supervision:
    """How a loss reads its targets: labels of `ignore_index` and -100 are none, `weight_column` weighs the others."""

    ignore_index: int = IGNORE_INDEX
    weight_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the loss declares."""
        return () if self.weight_column is None else (self.weight_column,)

    def targets(self, labels: torch.Tensor, columns: Mapping[str, torch.Tensor], num_classes: int) -> Targets:
        """The targets among `labels`, which are shifted already.

        Args:
            labels: (batch, sequence).
            columns: holds the weights, in the shape of the labels.
            num_classes: the size of the vocabulary.

        Raises:
            RunError: a label is none of the vocabulary's, or the weights have another shape.
        """
        flat = labels.flatten()
        supervised = (flat != IGNORE_INDEX) & (flat != self.ignore_index)
        outside = supervised & ((flat < 0) | (flat >= num_classes))
        # One look for the whole micro-batch: a device would index with it, or fail without a word about which.
        if outside.any():
            raise RunError(
                f"loss_fn: the label {int(flat[outside][0])} is outside the vocabulary of {num_classes}; "
                f"set loss_fn.ignore_index if it marks positions without a target"
            )
        flat = torch.where(supervised, flat, IGNORE_INDEX)
        if self.weight_column is None:
            return Targets(flat, None)
        weights = columns[self.weight_column]
        if weights.shape != labels.shape:
            raise RunError(
                f"loss_fn: the column {self.weight_column!r} has the shape {tuple(weights.shape)}, "
                f"the labels have {tuple(labels.shape)}"
            )
        return Targets(flat, torch.where(supervised, weights.flatten(), 0))
