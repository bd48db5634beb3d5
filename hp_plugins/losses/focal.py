"""Focal loss for causal language models: tokens that the model predicts well count less."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field

from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.objective import at_least_fp32, summed
from hp_plugins.losses.router import RouterBalance, RouterZLoss
from hp_plugins.losses.targets import IgnoreIndex, TokenWeights
from hp_plugins.losses.token_loss import TokenLoss

Gamma = Annotated[
    float, Field(ge=0, description="How much less well-predicted tokens count; 0 is plain cross entropy.")
]


class FocalLoss(TokenLoss):
    """`-(1 - p)^gamma * log p` of each target's probability `p`, summed over the supervised tokens, in fp32.

    Lin et al. 2017, "Focal Loss for Dense Object Detection", with the vocabulary as classes. The losses of a
    mixture's routers are terms of the step; see `RouterLosses`.
    """

    def __init__(
        self,
        gamma: Gamma = 2.0,
        ignore_index: IgnoreIndex = IGNORE_INDEX,
        token_weights: TokenWeights = None,
        router_balance: RouterBalance = None,
        router_z_loss: RouterZLoss = 0.0,
    ) -> None:
        super().__init__(ignore_index, token_weights, router_balance, router_z_loss)
        self._gamma = gamma

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """The summed loss, a scalar in fp32, or in float64 for logits of float64.

        Args:
            model_output: has `logits` of shape (batch, sequence, vocabulary).
            labels: already shifted targets of shape (batch, sequence); -100 and `ignore_index` are left out.
            columns: the weights of the tokens, in the shape of the labels, under the name of their column.

        Raises:
            RunError: a label is outside the vocabulary.
        """
        logits = at_least_fp32(model_output.logits)
        targets = self._supervision.targets(labels, columns, logits.shape[-1])
        losses = F.cross_entropy(logits.flatten(0, 1), targets.labels, ignore_index=IGNORE_INDEX, reduction="none")
        if self._gamma:
            losses = modulated(losses, self._gamma)
        if targets.weights is not None:
            losses = losses * targets.weights
        return summed(losses)


def modulated(cross_entropies: torch.Tensor, gamma: float) -> torch.Tensor:
    """`(1 - exp(-c))^gamma * c`, with a derivative that is finite everywhere, for a gamma above 0.

    Args:
        cross_entropies: `c`, from 0 on.
        gamma: the exponent.
    """
    # 1 - p loses every digit where p is near 1.
    missed = -torch.expm1(-cross_entropies)
    # Where nothing is missed, a power below 1 has an infinite slope, which times the loss of 0 is no number.
    is_missed = missed > 0
    factor = torch.where(is_missed, missed, torch.ones_like(missed)).pow(gamma)
    return torch.where(is_missed, factor * cross_entropies, torch.zeros_like(factor))
