"""The load-balancing loss that a mixture of experts returns beside its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def router_coefficient(model: nn.Module) -> float:
    """The weight of the router's auxiliary loss in the model's configuration; 0 where it has none."""
    if isinstance(model, PreTrainedModel) and "router_aux_loss_coef" in model.config.to_dict():
        return float(model.config.router_aux_loss_coef)
    return 0.0


def with_router_loss(
    loss: torch.Tensor, model_output: Any, coefficient: float, total_weight: torch.Tensor
) -> torch.Tensor:
    """Add the mean that the model returned as `aux_loss`, if it did, to a sum over tokens of `total_weight`."""
    router_loss = model_output.get("aux_loss") if isinstance(model_output, Mapping) else None
    return loss if router_loss is None else loss + coefficient * router_loss * total_weight
