"""Dense cross entropy for causal language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from hp_core.training.loss import IGNORE_INDEX


class CausalLMLoss(nn.Module):
    """Cross entropy over the model's full logits, in fp32, summed over the supervised tokens.

    With label smoothing `e` over `V` classes a token's loss is `(1 - e) * -log p[y] + e / V * sum(-log p)` (Szegedy
    et al. 2016), and the z-loss adds `z * logsumexp(logits)^2` (PaLM, Chowdhery et al. 2022). The load-balancing
    loss of a mixture of experts that returns its router logits is added with the coefficient of the model's config.
    """

    reduction = "sum"

    def __init__(
        self,
        label_smoothing: Annotated[float, Field(ge=0, lt=1, description="Probability spread over all classes.")] = 0.0,
        z_loss: Annotated[float, Field(ge=0, description="Weight of the squared log-normaliser.")] = 0.0,
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self._router_coefficient = 0.0

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Read the weight of the router's auxiliary loss from the model's configuration."""
        del distributed_setup
        if isinstance(model, PreTrainedModel) and "router_aux_loss_coef" in model.config.to_dict():
            self._router_coefficient = float(model.config.router_aux_loss_coef)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the labels from the model, which would compute a loss of its own with them."""
        del loss_inputs
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss, a scalar in fp32.

        Args:
            model_output: has `logits` of shape (batch, sequence, vocabulary).
            labels: already shifted targets of shape (batch, sequence); -100 is left out.
        """
        logits = model_output.logits.flatten(0, 1).float()
        targets = labels.flatten()
        loss = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=self.label_smoothing
        )
        supervised = targets != IGNORE_INDEX
        if self.z_loss:
            loss = loss + self.z_loss * logits[supervised].logsumexp(-1).square().sum()
        router_loss = model_output.get("aux_loss") if isinstance(model_output, Mapping) else None
        if router_loss is not None:
            loss = loss + self._router_coefficient * router_loss * supervised.sum()
        return loss
