"""Losses whose values are known without a model: sums of labels, by what each declares."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hp_core.training.loss import contract_of


class Declaring(nn.Module):
    """A token's loss is its label, reduced as declared, and `0 * logits`, which leads to the model."""

    def __init__(
        self,
        reduction: str = "mean",
        weight_column: str | None = None,
        ignore_index: int = -100,
        diagnostics: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.columns = () if weight_column is None else (weight_column,)
        self.weight_column = weight_column
        self.ignore_index = ignore_index
        self.diagnostics = tuple(diagnostics or ())

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the labels from the model."""
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> Any:
        """The reduced labels, and with diagnostics twice as much under each of their names."""
        values = labels + 0 * model_output.logits.mean(-1)
        loss = contract_of(self).reduced(values, labels, columns)
        if not self.diagnostics:
            return loss
        return {"label_loss": loss, **dict.fromkeys(self.diagnostics, 2 * loss)}
