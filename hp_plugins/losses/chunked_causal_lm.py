"""Cross entropy for causal language models that never holds the logits of all tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hp_core.errors import RunError
from hp_core.parallel.tensor.vocabulary import is_loss_parallel
from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.chunk_size import Chunks, ChunkSize, MemoryBudget
from hp_plugins.losses.chunked import ChunkedHeadLoss
from hp_plugins.losses.head import LossHead, call_briefly, measure_transform
from hp_plugins.losses.in_head import HeadCall, answered
from hp_plugins.losses.objective import Objective
from hp_plugins.losses.router import RouterBalance, RouterZLoss
from hp_plugins.losses.targets import IgnoreIndex, LabelSmoothing, Targets, TokenWeights, ZLoss
from hp_plugins.losses.token_loss import TokenLoss


class ChunkedCausalLMLoss(TokenLoss):
    """The loss of `causal_lm`, computed within the model's head for some tokens at a time.

    The logits of a model with a large vocabulary take far more memory than its hidden states. This loss takes them
    from the head in chunks, together with their gradients, and lets the model return a zero of shape (1, 1, 1) as its
    `logits`, through which the gradient flows. The head works as before outside of training and evaluation steps.
    """

    withholds_logits = True
    on_vocabulary_shards = True

    def __init__(
        self,
        label_smoothing: LabelSmoothing = 0.0,
        z_loss: ZLoss = 0.0,
        ignore_index: IgnoreIndex = IGNORE_INDEX,
        token_weights: TokenWeights = None,
        router_balance: RouterBalance = None,
        router_z_loss: RouterZLoss = 0.0,
        chunk_size: ChunkSize = "auto",
        memory_budget_mib: MemoryBudget = None,
    ) -> None:
        super().__init__(ignore_index, token_weights, router_balance, router_z_loss)
        self._objective = Objective(label_smoothing, z_loss)
        self._chunks = Chunks(chunk_size, memory_budget_mib)
        self._has_head = True
        self._bound: _Bound | None = None
        self._pending: HeadCall | None = None

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        """Take the place of the head's `forward`, and see what the model does to the head's output.

        Raises:
            InputError: the model's head is of another kind, or the memory budget is less than a token takes.
        """
        super().bind_model(model, distributed_setup)
        self._has_head = distributed_setup is None or distributed_setup.has_last_stage
        if not self._has_head:
            call_briefly(model)  # the rank with the head measures
            return
        head = LossHead.of(model)
        transform = measure_transform(model, head)
        weight, shard = head.head.weight, head.shard if is_loss_parallel(distributed_setup) else None
        num_classes = len(weight) if shard is None else shard.longest
        chunk_size = self._chunks.num_tokens(weight, transform, num_classes=num_classes)
        loss = ChunkedHeadLoss(replace(self._objective, vocabulary=shard), transform, chunk_size)
        self._bound, self._pending = _Bound(head, loss, shard is not None), None

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Hand the labels to the head instead of the model, for the model's next call."""
        if not self._has_head:
            return super().prepare_model_inputs(model_inputs, loss_inputs)
        bound = self._require_bound()

        def compute(hidden: torch.Tensor, head: nn.Linear, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
            return bound.loss(hidden, head.weight, head.bias, targets)

        columns = {name: loss_inputs[name] for name in self.columns}
        self._pending = HeadCall(self._supervision, loss_inputs["labels"], columns, compute)
        bound.head.ask(self._pending.answer, on_shards=bound.on_shards)
        return super().prepare_model_inputs(model_inputs, loss_inputs)

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """The summed loss, a scalar in fp32, or in float64 for a model of float64.

        Args:
            model_output: of the call whose inputs `prepare_model_inputs` prepared.
            labels: the same that it was given; so are the columns.

        Raises:
            RunError: the labels are others, or the model did not call its head.
        """
        del columns
        bound, pending, self._pending = self._require_bound(), self._pending, None
        total = answered(pending, labels, "loss_fn: causal_lm works without")
        loss: torch.Tensor = total + model_output.logits.sum() / bound.loss.transform.scale
        return loss

    def _require_bound(self) -> _Bound:
        if self._bound is None:
            raise RunError("loss_fn: bind_model was not called; chunked_causal_lm computes within the model's head")
        return self._bound


@dataclass(frozen=True)
class _Bound:
    """What a loss knows of its model."""

    head: LossHead
    loss: ChunkedHeadLoss
    on_shards: bool
