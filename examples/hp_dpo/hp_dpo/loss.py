"""The DPO loss of pairs of answers, from the log-probabilities that two models give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field


@dataclass(frozen=True)
class PairLogProbs:
    """The log-probabilities of whole answers, `[pairs, 2]`: the chosen one's, then the rejected one's."""

    policy: torch.Tensor
    reference: torch.Tensor


class DpoLoss(torch.nn.Module):
    """Sigmoid DPO (Rafailov et al. 2023); with label smoothing, conservative DPO (Mitchell 2023).

    With `z = beta * ((policy - reference of the chosen) - (policy - reference of the rejected))` a pair's loss is
    `-(1 - label_smoothing) * log sigmoid(z) - label_smoothing * log sigmoid(-z)`. The trainer takes the mean over the
    pairs of the whole step, or of the whole evaluation.
    """

    reduction = "sample"
    # Logged, and no part of what is trained.
    diagnostics = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")

    def __init__(
        self,
        beta: Annotated[float, Field(gt=0, description="How dear it is to move away from the reference.")] = 0.1,
        label_smoothing: Annotated[
            float, Field(ge=0, lt=0.5, description="The share of pairs to reckon with that are labelled wrongly.")
        ] = 0.0,
    ) -> None:
        super().__init__()
        self.beta, self.label_smoothing = beta, label_smoothing

    def forward(self, *, model_output: PairLogProbs, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """A value for each pair: the loss, both rewards, their difference, and 1 where the chosen one's is higher."""
        rewards = self.beta * (model_output.policy - model_output.reference)
        chosen, rejected = rewards.unbind(-1)
        margin = chosen - rejected
        right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
        return {
            "loss": -(1 - self.label_smoothing) * right - self.label_smoothing * wrong,
            "chosen_reward": chosen.detach(),
            "rejected_reward": rejected.detach(),
            "reward_margin": margin.detach(),
            "reward_accuracy": (margin > 0).to(margin.dtype),
        }
