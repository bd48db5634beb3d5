"""The loss, a component that a recipe names under `loss_fn`."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

IGNORED = -100


class FocalLoss(nn.Module):
    """Cross entropy that counts a token less, the surer the model is of it (Lin et al. 2017, equation 4).

    A token whose target has the probability `p` costs `-(1 - p)^gamma * log p`; the cost of all supervised tokens is
    added up, in fp32 or wider. The load-balancing loss of a mixture of experts is not part of it.
    """

    # The trainer divides a sum by the supervised tokens of the whole step.
    reduction = "sum"

    def __init__(
        self, gamma: Annotated[float, Field(ge=0, description="0 is cross entropy; more leaves easy tokens out.")] = 2.0
    ) -> None:
        super().__init__()
        self.gamma = gamma

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Keep the labels from the model, which would compute a loss of its own with them."""
        del loss_inputs
        return {name: value for name, value in model_inputs.items() if name not in ("labels", "shift_labels")}

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed loss, a scalar.

        Args:
            model_output: has `logits` of shape (rows, tokens, vocabulary).
            labels: targets of shape (rows, tokens), shifted already; -100 is left out.
        """
        logits = model_output.logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # 0 where a token is ignored, and so is its weight.
        negative_log_p = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
        # 1 - p without cancellation. At p = 1 the slope of a power below one is infinite, and would be NaN times zero.
        doubt = (-torch.expm1(-negative_log_p)).clamp_min(torch.finfo(logits.dtype).tiny)
        return (doubt**self.gamma * negative_log_p).sum()
