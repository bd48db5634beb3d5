"""The loss of a token given its logits, with and without automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from hp_core.training.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Objective:
    """`(1 - e) * -log p[y] + e / V * sum(-log p) + z * logsumexp(logits)^2`, times the token's weight.

    `e` is the label smoothing over `V` classes (Szegedy et al. 2016), `z` the weight of the z-loss (PaLM, Chowdhery
    et al. 2022).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    shape: ClassVar[tuple[int, ...]] = ()

    def total(self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over all tokens, a scalar in fp32, or in float64 for logits of float64.

        Args:
            logits: (tokens, classes).
            targets: (tokens,); those of -100 add nothing.
            weights: (tokens,), or None for one each.
        """
        logits = at_least_fp32(logits)
        loss = F.cross_entropy(
            logits,
            targets,
            ignore_index=IGNORE_INDEX,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        if weights is not None:
            loss = loss * weights
        total = summed(loss)
        if self.z_loss:
            supervised = targets != IGNORE_INDEX
            squares = logits[supervised].logsumexp(-1).square()
            total = total + self.z_loss * summed(squares if weights is None else squares * weights[supervised])
        return total

    def total_and_gradient_(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same sum; `logits` holds its derivative afterwards. Needs no second buffer of their size.

        Args:
            logits: (tokens, classes) in fp32 or float64; overwritten.
            targets: (tokens,), none of them -100.
            weights: (tokens,) in the dtype of `logits`, or None for one each.
        """
        num_classes = logits.shape[1]
        rows = torch.arange(len(targets), device=targets.device)
        largest = logits.amax(-1)
        logits.sub_(largest[:, None])
        of_target = logits[rows, targets]
        mean = logits.mean(-1) if self.label_smoothing else None
        sums = logits.exp_().sum(-1)
        log_sums = sums.log()
        loss = log_sums - (1 - self.label_smoothing) * of_target
        if mean is not None:
            loss -= self.label_smoothing * mean
        factor = sums.reciprocal()
        if self.z_loss:
            log_normaliser = log_sums + largest
            loss += self.z_loss * log_normaliser.square()
            factor *= 1 + 2 * self.z_loss * log_normaliser
        at_target = torch.full_like(loss, 1 - self.label_smoothing)
        elsewhere = torch.full_like(loss, self.label_smoothing / num_classes)
        if weights is not None:
            for one in (loss, factor, at_target, elsewhere):
                one *= weights
        logits.mul_(factor[:, None])
        if self.label_smoothing:
            logits.sub_(elsewhere[:, None])
        logits[rows, targets] -= at_target
        return summed(loss)


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def summed(losses: torch.Tensor) -> torch.Tensor:
    """The sum, rounded once: what is logged must not depend on which tokens were added up together."""
    return losses.sum(dtype=torch.float64).to(losses.dtype)
