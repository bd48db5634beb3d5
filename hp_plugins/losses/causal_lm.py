"""Dense cross entropy for causal language models."""

from __future__ import annotations

from typing import Any

import torch

from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.objective import Objective
from hp_plugins.losses.router import RouterBalance, RouterZLoss
from hp_plugins.losses.targets import IgnoreIndex, LabelSmoothing, TokenWeights, ZLoss
from hp_plugins.losses.token_loss import TokenLoss


class CausalLMLoss(TokenLoss):
    """Cross entropy over the model's full logits, in fp32, summed over the supervised tokens.

    `Objective` is its formula. The losses of a mixture's routers are terms of the step; see `RouterLosses`.
    """

    def __init__(
        self,
        label_smoothing: LabelSmoothing = 0.0,
        z_loss: ZLoss = 0.0,
        ignore_index: IgnoreIndex = IGNORE_INDEX,
        token_weights: TokenWeights = None,
        router_balance: RouterBalance = None,
        router_z_loss: RouterZLoss = 0.0,
    ) -> None:
        super().__init__(ignore_index, token_weights, router_balance, router_z_loss)
        self._objective = Objective(label_smoothing, z_loss)

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
        return self._objective.total(logits.flatten(0, 1), targets.labels, targets.weights)
