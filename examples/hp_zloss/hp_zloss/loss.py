"""The loss around another loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hp_core import RunError
from hp_core.training.loss import BindsModel, PreparesModelInputs, columns_of, reduction_of

IGNORED = -100


class ZLoss(nn.Module):
    """Adds `weight * logsumexp(logits)^2` for each supervised token to another loss (PaLM, Chowdhery et al. 2022).

    It keeps the normaliser of the softmax near one. The logits are those of the model's head, before a family caps or
    scales them, so `plugin.py` lets this module listen to the head.

    It reduces as the other loss does, over the tokens of `labels`: their mean, or their sum. Everything else that the
    trainer asks of a loss is passed on to the other one.
    """

    def __init__(self, loss_fn: nn.Module, weight: float = 1e-4) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.weight = weight
        self.reduction = reduction_of(loss_fn)
        self.columns = columns_of(loss_fn)
        self._is_expecting = False
        self._logits: torch.Tensor | None = None

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Show the other loss the model, if it wants to see it."""
        if isinstance(self.loss_fn, BindsModel):
            self.loss_fn.bind_model(model=model, distributed_setup=distributed_setup)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Let the other loss prepare the model's inputs, if it does."""
        if isinstance(self.loss_fn, PreparesModelInputs):
            return self.loss_fn.prepare_model_inputs(model_inputs=model_inputs, loss_inputs=loss_inputs)
        return model_inputs

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
        loss = self.loss_fn(model_output=model_output, labels=labels, **columns)
        entries = dict(loss) if isinstance(loss, Mapping) else {"task_loss": loss}
        if "z_loss" in entries:
            raise RunError(f"hp-zloss: {type(self.loss_fn).__name__} has an entry 'z_loss' already")
        return {**entries, "z_loss": self.weight * self._penalty(labels)}

    def _penalty(self, labels: torch.Tensor) -> torch.Tensor:
        logits, self._logits = self._logits, None
        if logits is None or logits.shape[:-1] != labels.shape:
            found = "none" if logits is None else f"logits of shape {tuple(logits.shape)}"
            raise RunError(f"hp-zloss: labels of shape {tuple(labels.shape)} need the head's logits, got {found}")
        supervised = labels != IGNORED
        chosen = logits[supervised]
        squares = chosen.to(torch.promote_types(chosen.dtype, torch.float32)).logsumexp(-1).square().sum()
        # Without supervised tokens the trainer leaves the loss out; it is 0 here, and not 0 / 0.
        return squares if self.reduction == "sum" else squares / supervised.sum().clamp_min(1)
