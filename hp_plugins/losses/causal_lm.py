"""Dense cross entropy for causal language models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hp_core.parallel.tensor.vocabulary import is_loss_parallel, logits_of
from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.head import LossHead
from hp_plugins.losses.objective import Objective
from hp_plugins.losses.router import RouterBalance, RouterZLoss
from hp_plugins.losses.targets import IgnoreIndex, LabelSmoothing, TokenWeights, ZLoss
from hp_plugins.losses.token_loss import TokenLoss


class CausalLMLoss(TokenLoss):
    """Cross entropy over the model's full logits, in fp32, summed over the supervised tokens.

    `Objective` is its formula. The losses of a mixture's routers are terms of the step; see `RouterLosses`.
    """

    def __init__(
        self,
        label_smoothing: LabelSmoothing = 0.0,
        z_loss: ZLoss = 0.0,
        ignore_index: IgnoreIndex = IGNORE_INDEX,
        token_weights: TokenWeights = None,
        router_balance: RouterBalance = None,
        router_z_loss: RouterZLoss = 0.0,
    ) -> None:
        super().__init__(ignore_index, token_weights, router_balance, router_z_loss)
        self._objective = Objective(label_smoothing, z_loss)
        self._head: LossHead | None = None

    @property
    def on_vocabulary_shards(self) -> bool:
        """Whether logits may be those of a rank's part of the vocabulary; a subclass that reads them may not know."""
        return type(self).forward is CausalLMLoss.forward

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """With loss parallelism, have the head keep to this rank's part of the vocabulary. Every rank calls it.

        Raises:
            InputError: the model's head is of another kind.
        """
        super().bind_model(model, distributed_setup)
        if is_loss_parallel(distributed_setup) and distributed_setup.has_last_stage:
            self._head = LossHead.of(model)
            self._objective = replace(self._objective, vocabulary=self._head.shard)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Ask the head for the logits of this rank's part of the vocabulary, where the loss is computed on them."""
        if self._head is not None:
            self._head.ask(logits_of, on_shards=True)
        return super().prepare_model_inputs(model_inputs, loss_inputs)

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """The summed loss, a scalar in fp32, or in float64 for logits of float64.

        Args:
            model_output: has `logits` of shape (batch, sequence, vocabulary), or the rank's own part of it.
            labels: already shifted targets of shape (batch, sequence); -100 and `ignore_index` are left out.
            columns: the weights of the tokens, in the shape of the labels, under the name of their column.

        Raises:
            RunError: a label is outside the vocabulary.
        """
        logits = model_output.logits
        vocabulary = self._objective.vocabulary
        targets = self._supervision.targets(labels, columns, vocabulary.size if vocabulary else logits.shape[-1])
        return self._objective.total(logits.flatten(0, 1), targets.labels, targets.weights)
