"""The loss of a token given its logits, with and without automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hp_core.parallel.tensor.vocabulary import VocabularyShard
from hp_core.training.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Objective:
    """`(1 - e) * -log p[y] + e / V * sum(-log p) + z * logsumexp(logits)^2`, times the token's weight.

    `e` is the label smoothing over `V` classes (Szegedy et al. 2016), `z` the weight of the z-loss (PaLM, Chowdhery
    et al. 2022). With `vocabulary`, logits are those of this rank's classes, targets are of all, and every tensor rank
    calls it for the same tokens.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocabulary: VocabularyShard | None = None
    shape: ClassVar[tuple[int, ...]] = ()

    def total(self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over all tokens, a scalar in fp32, or in float64 for logits of float64.

        Args:
            logits: (tokens, classes).
            targets: (tokens,); those of -100 add nothing.
            weights: (tokens,), or None for one each.
        """
        logits = at_least_fp32(logits)
        if self.vocabulary is not None:
            total: torch.Tensor = _TotalOnShards.apply(logits, targets, weights, self)  # type: ignore[no-untyped-call]
            return total
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
        rows = torch.arange(len(targets), device=targets.device)
        largest = self._largest(logits)
        logits.sub_(largest[:, None])
        places, is_own = (targets, None) if self.vocabulary is None else self.vocabulary.own(targets)
        of_target = logits[rows, places]
        if is_own is not None:
            of_target = of_target.where(is_own, 0)
        total = logits.sum(-1) if self.label_smoothing else None
        sums, of_target, total = self._summed(logits.exp_().sum(-1), of_target, total)
        num_classes = logits.shape[1] if self.vocabulary is None else self.vocabulary.size
        log_sums = sums.log()
        loss = log_sums - (1 - self.label_smoothing) * of_target
        if total is not None:
            loss -= self.label_smoothing * (total / num_classes)
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
        logits[rows, places] -= at_target if is_own is None else at_target.where(is_own, 0)
        return summed(loss)

    def _largest(self, logits: torch.Tensor) -> torch.Tensor:
        largest = logits.amax(-1)
        if self.vocabulary is not None and len(largest):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.vocabulary.group)
        return largest

    def _summed(
        self, sums: torch.Tensor, of_target: torch.Tensor, total: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Numbers of each token, summed over the whole vocabulary in one collective."""
        if self.vocabulary is None or not len(sums):
            return sums, of_target, total
        stacked = torch.stack([sums, of_target] if total is None else [sums, of_target, total])
        dist.all_reduce(stacked, group=self.vocabulary.group)
        return stacked[0], stacked[1], None if total is None else stacked[2]


class _TotalOnShards(torch.autograd.Function):
    """`Objective.total` of the logits of a rank's classes, whose derivative is taken on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, objective: Objective
    ) -> torch.Tensor:
        learnt = (targets != IGNORE_INDEX).nonzero().flatten()
        rows = logits.index_select(0, learnt)
        weights = None if weights is None else weights.index_select(0, learnt).to(rows.dtype)
        total = objective.total_and_gradient_(rows, targets.index_select(0, learnt), weights)
        ctx.save_for_backward(rows, learnt)
        ctx.shape = logits.shape
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, learnt = ctx.saved_tensors
        return rows.new_zeros(ctx.shape).index_copy_(0, learnt, rows * outer[0]), None, None, None


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def summed(losses: torch.Tensor) -> torch.Tensor:
    """The sum, rounded once: what is logged must not depend on which tokens were added up together."""
    return losses.sum(dtype=torch.float64).to(losses.dtype)
