"""Dense cross entropy for causal language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.auxiliary import router_coefficient, with_router_loss
from hp_plugins.losses.objective import Objective
from hp_plugins.losses.targets import IgnoreIndex, LabelSmoothing, Supervision, TokenWeights, ZLoss


class CausalLMLoss(nn.Module):
    """Cross entropy over the model's full logits, in fp32, summed over the supervised tokens.

    `Objective` is its formula. The load-balancing loss of a mixture of experts that returns its router logits is
    added with the coefficient of the model's config.
    """

    reduction = "sum"
    columns: Sequence[str]
    weight_column: str | None
    ignore_index: int

    def __init__(
        self,
        label_smoothing: LabelSmoothing = 0.0,
        z_loss: ZLoss = 0.0,
        ignore_index: IgnoreIndex = IGNORE_INDEX,
        token_weights: TokenWeights = None,
    ) -> None:
        super().__init__()
        self._objective = Objective(label_smoothing, z_loss)
        self._supervision = Supervision(ignore_index, token_weights)
        self.columns, self.weight_column, self.ignore_index = self._supervision.columns, token_weights, ignore_index
        self._router_coefficient = 0.0

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Read the weight of the router's auxiliary loss from the model's configuration."""
        del distributed_setup
        self._router_coefficient = router_coefficient(model)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the labels from the model, which would compute a loss of its own with them."""
        del loss_inputs
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """The summed loss, a scalar in fp32, or in float64 for logits of float64.

        Args:
            model_output: has `logits` of shape (batch, sequence, vocabulary).
            labels: already shifted targets of shape (batch, sequence); -100 and `ignore_index` are left out.
            columns: the weights of the tokens, in the shape of the labels, under the name of their column.

        Raises:
            RunError: a label is outside the vocabulary.
        """
        logits = model_output.logits
        targets = self._supervision.targets(labels, columns, logits.shape[-1])
        loss = self._objective.total(logits.flatten(0, 1), targets.labels, targets.weights)
        return with_router_loss(loss, model_output, self._router_coefficient, targets.total_weight())
