"""A loss around another one that keeps the logits' normaliser near 1."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from hp_core import LossWrapper, Target
from hp_core.config.nested import ComponentOf
from hp_core.config.signature import Signature
from hp_core.errors import ArgumentError
from hp_plugins.losses.marks import withholds_logits
from hp_plugins.losses.objective import at_least_fp32

Loss = Annotated[Target, ComponentOf("hp.losses"), Field(description="The loss that is added to.")]
Coefficient = Annotated[float, Field(ge=0, description="Weight of the squared log-normaliser.")]


class ZLoss(LossWrapper):
    """Adds the entry `z_loss`, `coefficient * logsumexp(logits)^2` of each target, reduced as the other loss is.

    PaLM, Chowdhery et al. 2022. The logits are those that the model returns, in fp32.
    """

    def __init__(self, loss: Loss, coefficient: Coefficient = 1e-4) -> None:
        super().__init__(_with_logits(loss, coefficient))
        self._coefficient = coefficient

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """The other loss's entries, and `z_loss`.

        Args:
            model_output: has `logits` of shape (batch, sequence, vocabulary).
            labels: already shifted targets of shape (batch, sequence).
            columns: what the other loss declares.
        """
        entries = self.entries_of(model_output, labels, columns)
        squares = at_least_fp32(model_output.logits).logsumexp(-1).square()
        return self.with_entry(entries, "z_loss", self.inner.reduced(self._coefficient * squares, labels, columns))


def _with_logits(loss: Target, coefficient: float) -> nn.Module:
    """The other loss.

    Raises:
        ArgumentError: the model would return no logits under it.
    """
    built: nn.Module = loss.build()
    if any(isinstance(one, ZLoss) for one in built.modules()):
        raise ArgumentError("loss", "has a z-loss around it already", "add the coefficients up in one")
    if withholds_logits(built):
        message = f"{loss.spelling!r} computes within the model's head, which then returns no logits"
        hint = "use a loss of the logits, such as causal_lm"
        if "z_loss" in Signature.of(loss.load()).parameters:
            hint = f"write loss_fn: {{name: {loss.spelling}, z_loss: {coefficient}}}"
        raise ArgumentError("loss", message, hint)
    return built
