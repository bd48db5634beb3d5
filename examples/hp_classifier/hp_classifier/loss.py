"""The loss of one label a text, and how often the likeliest label is the right one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100


class ClassificationLoss(torch.nn.Module):
    """Cross entropy over the texts of a batch, with the accuracy beside it.

    Both are sums over texts, which the trainer divides by the texts of the whole step, or of the whole evaluation.
    """

    reduction = "sum"
    # Logged, and no part of what is trained.
    diagnostics = ("accuracy",)

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits are `[texts, classes]`; labels `[texts, 1]`, -100 where there is no text."""
        labels, logits = labels.flatten(), model_output.logits.float()
        is_right = (logits.detach().argmax(-1) == labels).sum()
        return {
            "loss": F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"),
            "accuracy": is_right.to(logits.dtype),
        }
