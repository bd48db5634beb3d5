"""How far a student's distribution over the next token is from a teacher's, with its derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Divergence:
    """`a * T^2 * KL + (1 - a) * -log q[y]`, times the token's weight.

    `KL` is between the teacher's `softmax(logits / T)` and the student's: KL(teacher || student) for `forward`,
    KL(student || teacher) for `reverse`. `T^2` keeps the size of its gradient (Hinton et al. 2015). `q` is the
    student's softmax without a temperature, `a` the `kl_weight`.
    """

    direction: Direction = "forward"
    temperature: float = 1.0
    kl_weight: float = 1.0

    def sums_and_gradient_(
        self, logits: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """The weighted sums of loss, `KL` and `-log q[y]` over all tokens; `logits` holds the loss's derivative then.

        It needs two more buffers of the size of the logits.

        Args:
            logits: the student's, (tokens, classes), in fp32 or float64; overwritten.
            teacher: the teacher's, likewise.
            targets: (tokens,), none of them -100.
            weights: (tokens,) in the dtype of `logits`, or None for one each.
        """
        rows = torch.arange(len(targets), device=targets.device)
        softened, scratch = torch.empty_like(logits), torch.empty_like(logits)
        log_normaliser = _log_normaliser(logits, scratch)
        cross_entropy = log_normaliser - logits[rows, targets]
        torch.div(logits, self.temperature, out=softened)
        softened.sub_(_log_normaliser(softened, scratch)[:, None])
        teacher.div_(self.temperature)
        teacher.sub_(_log_normaliser(teacher, scratch)[:, None])
        divergence = self._divergence_(softened, teacher, scratch)
        for_divergence = torch.full_like(divergence, self.kl_weight * self.temperature)
        for_targets = torch.full_like(divergence, 1 - self.kl_weight)
        loss = for_divergence * self.temperature * divergence + for_targets * cross_entropy
        sums = torch.stack((loss, divergence, cross_entropy))
        if weights is not None:
            sums, for_divergence, for_targets = sums * weights, for_divergence * weights, for_targets * weights
        logits.sub_(log_normaliser[:, None]).exp_()
        logits[rows, targets] -= 1
        logits.mul_(for_targets[:, None]).add_(softened.mul_(for_divergence[:, None]))
        return sums.sum(-1)

    def _divergence_(self, student: torch.Tensor, teacher: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """The divergence of each token; `student` holds its derivative by `logits / temperature` then.

        Args:
            student: log-probabilities, (tokens, classes); overwritten, as the others are.
            teacher: likewise.
            scratch: a buffer of their shape.
        """
        if self.direction == "forward":
            torch.sub(teacher, student, out=scratch)
            teacher.exp_()
            student.exp_().sub_(teacher)
            return scratch.mul_(teacher).sum(-1)
        torch.sub(student, teacher, out=scratch)
        student.exp_()
        divergence = torch.mul(student, scratch, out=teacher).sum(-1)
        student.mul_(scratch.sub_(divergence[:, None]))
        return divergence


def _log_normaliser(logits: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """`logsumexp` over the classes, with a buffer of the same shape instead of a new one."""
    largest = logits.amax(-1)
    return torch.sub(logits, largest[:, None], out=scratch).exp_().sum(-1).log_().add_(largest)
