"""The loss around another loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hp_core import LossWrapper, RunError


class ZLoss(LossWrapper):
    """Adds `weight * logsumexp(logits)^2` for each supervised token to another loss (PaLM, Chowdhery et al. 2022).

    It keeps the normaliser of the softmax near one. The logits are those of the model's head, before a family caps or
    scales them, so `plugin.py` lets this module listen to the head.

    It reduces as the other loss does, over the tokens of `labels`: their mean, their sum, or the mean of each row, with
    the other's weights. Everything else that the trainer asks of a loss is passed on to the other one.
    """

    def __init__(self, loss_fn: nn.Module, weight: float = 1e-4) -> None:
        super().__init__(loss_fn)
        self.weight = weight
        self._is_expecting = False
        self._logits: torch.Tensor | None = None

    def listen_to(self, head: nn.Module) -> None:
        """Take the logits from this module's output, whenever they are expected."""
        head.register_forward_hook(self._hear)

    def expect_logits(self) -> None:
        """Forget the logits of an earlier pass; the head's next output is the one to take."""
        self._is_expecting = True
        self._logits = None

    def _hear(self, head: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        del head, inputs
        if self._is_expecting:
            self._is_expecting = False
            self._logits = output

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: Any) -> dict[str, torch.Tensor]:
        """Return the entries of the other loss (`task_loss`, if it is one tensor) and `z_loss`, all of them scalars.

        Args:
            model_output: what the model returned, for the other loss.
            labels: targets of shape (rows, tokens), shifted already; -100 is left out.
            columns: what else the other loss asks for.
        """
        entries = self.entries_of(model_output, labels, columns)
        return self.with_entry(entries, "z_loss", self.weight * self._penalty(labels, columns))

    def _penalty(self, labels: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, self._logits = self._logits, None
        if logits is None or logits.shape[:-1] != labels.shape:
            found = "none" if logits is None else f"logits of shape {tuple(logits.shape)}"
            raise RunError(f"hp-zloss: labels of shape {tuple(labels.shape)} need the head's logits, got {found}")
        squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
        return self.inner.reduced(squares, labels, columns)
